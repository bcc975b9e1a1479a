"""One lake as polars frames: its tables, views and reports (`OpenLake`), and an `Experiment`'s data. It only reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import duckdb
import orjson
import polars as pl

from etpi.api.scan import ORIGINS, StoredTable, UnknownName
from etpi_resources.lake import catalog, questions
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.links import experiment_page, view_url

Keys = str | Sequence[str]


def open_lake(path: str | Path | None = None) -> OpenLake:
    """Open a lake for reading.

    Args:
        path: the lake's folder, or a project folder whose lake is in `data`. Without it, $ETPI_DATA, or ./data of the
            working directory.

    Raises:
        LakeError: there is no lake; the message names the folder.
    """
    named = os.environ.get("ETPI_DATA")
    root = Path(path or named or "data").expanduser().resolve()
    for folder in (root, root / "data"):
        lake = Lake(folder)
        if lake.refs():
            by_path = path is not None
            return OpenLake(lake, catalog.catalog_of(lake.root) if by_path else catalog.default_path(lake))
    why = "named by ETPI_DATA" if named else f"ETPI_DATA is not set, and the working directory is {Path.cwd()}"
    if path is not None:
        why = "the path that was given"
    state = "it has no asset in it" if root.is_dir() else "there is no such folder"
    raise LakeError(f"no lake in {root} ({why}): {state}. Name its folder: etpi.open('/path/to/data').")


def load(name: str, path: str | Path | None = None) -> Experiment:
    """Return an experiment of the lake in `path` (see `open_lake`).

    Raises:
        LakeError: there is no lake, or no such experiment in it; the message has the nearest names.
    """
    return open_lake(path).experiment(name)


class OpenLake:
    """The current versions of a lake. Each call reads the versions that are current at its time.

    If the newest version of a partition is blocked by a failed check, the last good version is shown, as in the
    catalog; `sql("FROM versions WHERE blocked_version IS NOT NULL")` lists such partitions.

    Attributes:
        root: the lake's folder.
        catalog: the DuckDB file that `sql` and `report` read.
    """

    def __init__(self, lake: Lake, catalog_path: Path) -> None:
        self.root, self.catalog = lake.root, catalog_path
        self._lake = lake

    def __repr__(self) -> str:
        return f"OpenLake({str(self.root)!r})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the experiments, each with a link to its page."""
        rows = self.scan("specs", columns=["kind", "name", "title"]).filter(kind="experiment").collect()
        items = (
            f'<li><a href="{escape(view_url(experiment_page(name)))}">{escape(name)}</a> {escape(title)}</li>'
            for name, title in rows.select("name", "title").sort("name").iter_rows()
        )
        return f"<p>{escape(str(self.root))}</p><ul>{''.join(items)}</ul>"

    # --- tables ----------------------------------------------------------------------------------------------------

    def scan(
        self,
        table: str,
        *,
        experiment: Keys | None = None,
        rollout_set: Keys | None = None,
        suite: Keys | None = None,
        origin: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pl.LazyFrame:
        """Return a stored table, from all assets that store it, as a lazy frame over parquet.

        Columns have the types of docs/reference/tables.md; added are the partition key of each asset (`experiment`,
        `rollout_set`, `suite`) and, where rollouts have several origins, `origin` (set, eval, rl) and `made_for` (the
        rollout set or experiment). Without data the frame is typed and empty. Files of other partitions than those
        asked for are not opened. The frame reads the versions that are current now, whenever it is collected.

        Args:
            experiment, rollout_set, suite: the partitions to read, a key or several. One of the three; a row belongs
                to one partition.
            origin: set, eval or rl.

        Raises:
            UnknownName: there is no such table, partition, origin or column; the message has the nearest names.
            DamagedFile: a file is missing or does not have its recorded sha256. Files are compared once per process.
        """
        stored = StoredTable.of(table)
        chosen = {
            name: [keys] if isinstance(keys, str) else list(keys)
            for name, keys in (("experiment", experiment), ("rollout_set", rollout_set), ("suite", suite))
            if keys is not None
        }
        if len(chosen) > 1:
            raise LakeError(f"a row belongs to one partition, so name one of {', '.join(chosen)}")
        nodes = list(stored.nodes)
        keys = None
        for name, keys in chosen.items():
            if name not in stored.sets:
                by = " or ".join(stored.sets) or "nothing"
                column = f'; for a column: .filter(pl.col("{name}") == ...)' if name in stored.schema else ""
                raise LakeError(f"the table {table!r} is partitioned by {by}, not by {name}{column}")
            self._require_keys(name, keys)
            nodes = [node for node in nodes if node.set == name]
        if origin is not None:
            if not stored.of_rollouts:
                raise LakeError(f"the rows of {table!r} have no origin")
            if origin not in ORIGINS.values():
                raise UnknownName.of("an origin", origin, {*ORIGINS.values()})
            nodes = [node for node in nodes if ORIGINS.get(node.name) == origin]
        frame = stored.scan(self._lake, nodes, keys)
        if columns is None:
            return frame
        for column in columns:
            if column not in stored.schema:
                raise UnknownName.of(f"a column of {table}", column, stored.schema.names())
        return frame.select(columns)

    def keys(self, set: str) -> list[str]:
        """Return the partitions of a set (experiment, rollout_set or suite) that the lake has, sorted."""
        return sorted({ref.key for ref in self._lake.refs() if ref.set == set})

    def _require_keys(self, set: str, keys: Sequence[str]) -> None:
        known = self.keys(set)
        for key in keys:
            if key not in known:
                raise UnknownName.of(
                    f"{'an' if set == 'experiment' else 'a'} {set} of the lake {self.root}", key, known
                )

    # --- SQL -------------------------------------------------------------------------------------------------------

    def sql(self, query: str, **parameters: Any) -> pl.DataFrame:
        """Run SQL on the catalog, opened read-only with times in UTC, and return the rows of its last statement.

        Parameters are bound: `sql("FROM turns WHERE rollout_id = $id", id=...)`. The catalog shows the lake as it was
        when the asset `catalog` was last materialized, which every job does at its end.

        Raises:
            LakeError: there is no catalog, or it names files that no longer exist.
            duckdb.Error: the query is wrong.
        """
        with self._connected() as connection:
            return connection.execute(query, parameters or None).pl()

    def report(self, name: str, **variables: Any) -> pl.DataFrame:
        """Run a file of sql/reports; `reports()` lists them with their questions.

        Args:
            variables: the variables that the file's header names.

        Raises:
            UnknownName: there is no such report, or it reads no such variable.
            LakeError: as `sql`.
        """
        known = questions.reports()
        if name not in known:
            raise UnknownName.of("a report of sql/reports", name, known)
        for variable in variables:
            if variable not in known[name].variables:
                raise UnknownName.of(f"a variable of the report {name}", variable, known[name].variables)
        with self._connected() as connection:
            for variable, value in variables.items():
                connection.execute(f"SET VARIABLE {variable} = $value", {"value": value})
            return connection.execute(known[name].text).pl()

    @staticmethod
    def reports() -> pl.DataFrame:
        """Return the reports: (report, question, variables)."""
        rows = [(name, question.title, sorted(question.variables)) for name, question in questions.reports().items()]
        schema = {"report": pl.String, "question": pl.String, "variables": pl.List(pl.String)}
        return pl.DataFrame(rows, schema=schema, orient="row")

    @contextmanager
    def _connected(self) -> Iterator[duckdb.DuckDBPyConnection]:
        if not self.catalog.exists():
            raise LakeError(f"there is no catalog at {self.catalog}; run `etpi run catalog`")
        with catalog.connect(self.catalog) as connection:
            try:
                yield connection
            except duckdb.IOException as error:
                raise LakeError(
                    f"the catalog {self.catalog} names files that cannot be read: {error}. If the lake was moved or "
                    "versions were deleted, run `etpi run catalog`."
                ) from error

    # --- experiments -----------------------------------------------------------------------------------------------

    def experiment(self, name: str) -> Experiment:
        """Return an experiment's data; raises UnknownName."""
        self._require_keys("experiment", [name])
        return Experiment(self, name)


@dataclass(frozen=True, repr=False)
class Experiment:
    """An experiment that a lake has data of; methods return empty frames for stages that have not run."""

    lake: OpenLake
    name: str

    def __repr__(self) -> str:
        return f"Experiment({self.name!r}, {self.lake!r})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the changes of the main metric, and a link to the page."""
        changed = self.lake.scan("changes", experiment=self.name).collect()
        rows = changed.filter(metric="solved") if "metric" in changed.columns else changed
        name, link = escape(self.name), escape(view_url(experiment_page(self.name)))
        return f'<p><a href="{link}">{name}</a></p>{rows._repr_html_() if len(rows) else "<p>not evaluated</p>"}'

    @property
    def spec(self) -> dict[str, Any]:
        """Return the spec as it was when the experiment last ran; raises LakeError if it never did."""
        rows = self.lake.scan("specs", experiment=self.name, columns=["spec"]).collect()
        if rows.is_empty():
            raise LakeError(f"the lake has no spec of {self.name!r}; run `etpi run {self.name}`")
        return orjson.loads(rows.item())

    def metrics(self) -> pl.DataFrame:
        """Return every measured rate and mean with n and its 95 % interval: the columns of the table `metrics`."""
        return self.lake.scan("metrics", experiment=self.name).collect()

    def failures(self) -> pl.DataFrame:
        """Return the rollouts of the evaluation that did not solve their task, with the reason (sql/reports/failures).

        One row per rollout: checkpoint_role, decoding, task_id, verdict, exit_status, reason, details (JSON), ...
        `infrastructure` is true for rollouts that failed outside the model, which rates exclude.
        """
        return self.lake.report("failures", experiment=self.name)

    def regressions(self) -> pl.DataFrame:
        """Return the tasks whose solved share changed between two checkpoints, losses first (sql/reports/regressions).

        One row per task, decoding and pair of checkpoints (`before`, `after`); `change` is lost or gained.
        """
        return self.lake.report("regressions", experiment=self.name)

    def transcript(self, rollout_id: str) -> pl.DataFrame:
        """Return one rollout as a conversation of all its agents on one clock (sql/reports/transcript).

        The rollout may be of this experiment's evaluation or reinforcement, or of a rollout set that it reads.

        Raises:
            UnknownName: there is no such rollout.
        """
        places = self.lake.sql(
            "SELECT origin, made_for FROM rollouts WHERE rollout_id = $rollout "
            "ORDER BY made_for = $experiment DESC, origin, made_for LIMIT 1",
            rollout=rollout_id, experiment=self.name,
        )  # fmt: skip
        if places.is_empty():
            known = self.lake.scan("rollouts", experiment=self.name, columns=["rollout_id"]).collect()
            raise UnknownName.of(
                f"a rollout of {self.name} or of a rollout set", rollout_id, known.to_series().to_list()
            )
        origin, made_for = places.row(0)
        return self.lake.report("transcript", rollout=rollout_id, origin=origin, made_for=made_for)

    def dataset(self) -> Dataset:
        """Return the experiment's training data."""
        return Dataset(self)


@dataclass(frozen=True, repr=False)
class Dataset:
    """The current training data of an experiment."""

    experiment: Experiment

    def __repr__(self) -> str:
        return f"Dataset({self.experiment!r})"

    def rows(self) -> pl.LazyFrame:
        """Return the training rows: the columns of the table `dataset_rows`; raises as `OpenLake.scan`."""
        return self.experiment.lake.scan("dataset_rows", experiment=self.experiment.name)

    def tokens(self) -> pl.LazyFrame:
        """Return every token of the training rows, each stored token once.

        A turn's prompt is listed as far as it adds to the turn that it extends (`prefix_turn`), so the tokens of an
        agent's turns in order are its conversation, without repetition.

        Columns: rollout_id, agent_id, turn (int32), prefix_turn (int32), pair_id, dataset_row_id, split, side (prompt
        or output), place (int32, the position in the turn's whole prompt + output), token_id (int32), text (null for a
        tokenizer that the catalog does not know), label (bool, whether the token is in the loss), weight (float64,
        weight x copies of the row for labels, else 0). Rows are in the order of the data set, tokens by place.

        Raises:
            LakeError: there is no catalog (the text of ids is in its view `vocabulary`); and as `OpenLake.scan`.
        """
        lake, name = self.experiment.lake, self.experiment.name
        pairs = lake.scan(
            "pairs", experiment=name, columns=["pair_id", "prefix_turn", *_SIDES.values(), "input_tokens"]
        )
        rows = self.rows().select(
            "rollout_id", "agent_id", "turn", "pair_id", "dataset_row_id", "split",
            total=pl.col("weight") * pl.col("copies"),
        ).join(pairs, on="pair_id", how="left", maintain_order="left")  # fmt: skip
        kept = ("rollout_id", "agent_id", "turn", "prefix_turn", "pair_id", "dataset_row_id", "split")
        added = pl.col("suffix_ids").list.len().cast(pl.Int32)
        first = {"prompt": pl.col("input_tokens") - added, "output": pl.col("input_tokens")}
        sides = [
            rows.select(
                *kept,
                side=pl.lit(side),
                place=pl.int_ranges(first[side], first[side] + pl.col(ids).list.len(), dtype=pl.Int32),
                token_id=pl.col(ids),
                label=pl.lit(side == "output"),
                weight=pl.col("total") if side == "output" else pl.lit(0.0),
                row=pl.int_range(pl.len()),
            )
            for side, ids in _SIDES.items()
        ]
        long = pl.concat(sides).filter(pl.col("token_id").list.len() > 0).explode("place", "token_id")
        return (
            long.join(self._vocabulary(), on="token_id", how="left")
            .sort("row", "place")
            .select(*kept, "side", "place", "token_id", "text", "label", "weight")
        )

    def _vocabulary(self) -> pl.LazyFrame:
        tokenizer = (self.experiment.spec.get("base") or {}).get("tokenizer")
        query = "SELECT id AS token_id, text FROM vocabulary WHERE tokenizer = $tokenizer"
        return self.experiment.lake.sql(query, tokenizer=tokenizer).lazy()


_SIDES = {"prompt": "suffix_ids", "output": "output_ids"}
