"""The tasks that reinforcement trains on, chosen by a query to the catalog (`rl.tasks_from`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import duckdb

from etpi_assets.specs.paths import expand
from etpi_assets.tasks.family import Task
from etpi_resources.inside import read_text
from etpi_resources.lake import catalog
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.questions import reports


def chosen_tasks(name: str, suite: str, tasks: Sequence[Task], lake: Lake) -> list[Task]:
    """Return the tasks in the column `task_id` of a query's result, in its order; it may read the variable `suite`.

    Args:
        name: a report of `sql/reports`, or a file.

    Raises:
        BadData: the query fails or has no such column, or its result is empty, names a task twice, or one that is none
            of the training split.
    """
    report = reports().get(name.removesuffix(".sql"))
    file = expand(name)
    if report is None and not file.is_file():
        raise BadData(f"rl.tasks_from: {name} is no report of sql/reports and no file; `etpi sql` lists the reports")
    text = report.text if report else read_text(file)
    with catalog.connect(catalog.default_path(lake)) as connection:
        connection.execute("SET VARIABLE suite = ?", [suite])
        try:
            result = connection.execute(text)
            columns = [column[0] for column in result.description or ()]
            names = [row[columns.index("task_id")] for row in result.fetchall()] if "task_id" in columns else []
        except duckdb.Error as error:
            raise BadData(f"rl.tasks_from: {name}: {error}") from error
    if not names:
        raise BadData(f"rl.tasks_from: the result of {name} has no row, or no column task_id; run `etpi sql {name}`")
    by_id = {task.task_id: task for task in tasks}
    if unknown := [task for task in names if task not in by_id]:
        raise BadData(f"rl.tasks_from: {name} names {unknown[0]}, which is no training task of {suite}")
    if twice := [task for task, count in Counter(names).items() if count > 1]:
        raise BadData(f"rl.tasks_from: {name} names {twice[0]} twice; a step has a task once")
    return [by_id[task] for task in names]
