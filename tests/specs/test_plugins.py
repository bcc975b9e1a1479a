"""Code of other distributions: the example package is built, installed and used by name, and its code counts."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etpi_assets.exports import export
from etpi_assets.graph import GRAPH
from etpi_assets.planning import versions
from etpi_assets.resources import Resources
from etpi_assets.scoring.rewards import functions
from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.specs import plugins
from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.specs.training import RewardTerm
from etpi_assets.tasks.families import known_families, load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.judged_rows import JudgedRows
from etpi_resources.lake.lake import Ref
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.curation import CURATION, CurationLake
from tests.support.rows import detect

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_plugin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, built and installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def site(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the installed package on the path of this process."""
    copy = shutil.copytree(built, tmp_path / "site")
    monkeypatch.syspath_prepend(str(copy))
    fresh()
    yield copy
    for module in [name for name in sys.modules if name.split(".")[0] == "own_plugin"]:
        del sys.modules[module]
    monkeypatch.undo()
    fresh()


def fresh() -> None:
    """Forget what was read of installed code, as a new process would not know it."""
    importlib.invalidate_caches()
    for cached in (
        plugins._plugins,
        versions.plugin_version,
        functions.version_of,
    ):
        cached.cache_clear()


def distribution(site: Path, name: str, group: str, entry: str) -> None:
    """Write the metadata of another distribution with one entry point."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    fresh()


@pytest.fixture
def room(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CurationLake:
    shutil.copytree(EXAMPLE / "specs", tmp_path / "specs")
    shutil.copytree(EXAMPLE / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return CurationLake(tmp_path)


def test_suite_and_engine_of_a_plugin_give_a_data_set_in_its_export(room: CurationLake, tmp_path: Path) -> None:
    assert "sorted_lines" in known_families()
    room.make("tasks", "own_lines")
    room.make_set("own_lines")
    outcomes = room.lake.read(Ref("raw_rollouts", "rollout_set", "own_lines"), "rollouts")["outcome"].to_pylist()
    assert [json.loads(text)["reward"] for text in outcomes] == [1.0] * 6
    for asset in CURATION:
        assert not room.make(asset, "own_lines").manifest.blocked
    resources = Resources(lake=room.lake, specs_folder=tmp_path / "specs")
    export("own_lines", "plain_text", tmp_path / "out", resources)
    text = (tmp_path / "out" / "turns.txt").read_text()
    assert text.count("LC_ALL=C sort input.txt > output.txt") == 6 * 2, (
        "each command as an output and in a later prompt"
    )


def test_format_of_a_plugin_is_recognised_and_its_rows_are_counted(room: CurationLake, tmp_path: Path) -> None:
    assert detect(tmp_path / "data") == "question_log"
    room.make_set("own_answers")
    ref = Ref("raw_rollouts", "rollout_set", "own_answers")
    assert room.lake.read(ref, "rollouts").num_rows == 5
    assert room.lake.read(ref, "quarantined")["reason"].to_pylist() == ["unknown_form"]


def test_reward_of_a_plugin_scores_and_has_a_version(site: Path) -> None:
    terms = [RewardTerm(function="outcome"), RewardTerm(function="brevity", weight=0.5, params={"longest": 5})]
    functions.check_terms(terms)
    scores = functions.score_attempt(Attempt("r", "t", "go", "text", turns=3, outcome=1.0), terms)
    assert [(s.function, s.weighted) for s in scores] == [("outcome", 1.0), ("brevity", 0.25)]
    before = functions.version_of("brevity")
    edit(site, "rewards.py", "attempt.turns - 1", "attempt.turns - 2")
    assert functions.version_of("brevity") != before
    with pytest.raises(SpecError, match=r"shortest; .*\['longest'\]"):
        functions.check_terms([RewardTerm(function="brevity", params={"shortest": 1})])


def edit(site: Path, file: str, old: str, new: str) -> None:
    path = site / "own_plugin" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    fresh()


USERS = {
    "raw_rollouts/own_lines",
    "raw_rollouts/own_answers",
    "rl_checkpoint/own_reward",
    "rl_rewards/own_reward",
    "tasks/own_lines",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "outdated"),
    [
        ("rewards.py", "attempt.turns - 1", "attempt.turns - 2", USERS),
        ("rewards.py", '"""A reward for', '"""Another reward for', set()),
    ],
)
def test_edit_of_a_plugin_outdates_what_uses_its_distribution(
    site: Path, file: str, old: str, new: str, outdated: set[str]
) -> None:
    specs = load_specs(EXAMPLE / "specs")
    places = [("raw_rollouts", name) for name in ("own_lines", "own_answers", "arithmetic_tiny_teacher")]
    places += [(asset, name) for asset in ("rl_checkpoint", "rl_rewards") for name in ("own_reward", "own_lines")]
    places += [("tito_pairs", "own_lines"), ("tasks", "own_lines")]

    def now() -> dict[str, versions.Versions]:
        return {f"{asset}/{key}": versions.versions_of(GRAPH[asset], key, specs).whole for asset, key in places}

    before = now()
    edit(site, file, old, new)
    after = now()
    assert {place for place in before if versions.raised(before[place], after[place])} == outdated


def test_plugin_that_declares_its_version_is_not_hashed(site: Path) -> None:
    specs = load_specs(EXAMPLE / "specs")
    first = "from __future__ import annotations\n"
    for file in ("rewards.py", "family.py"):
        edit(site, file, first, f"{first}\nETPI_VERSION = 1\n")
    before = versions.versions_of(GRAPH["rl_rewards"], "own_reward", specs).whole
    edit(site, "rewards.py", "attempt.turns - 1", "attempt.turns - 2")
    assert versions.versions_of(GRAPH["rl_rewards"], "own_reward", specs).whole == before
    edit(site, "rewards.py", "ETPI_VERSION = 1", "ETPI_VERSION = 2")
    after = versions.versions_of(GRAPH["rl_rewards"], "own_reward", specs).whole
    assert versions.raised(before, after) == {"plugin own_plugin.rewards": "plugin own_plugin.rewards changed"}


def test_rows_that_are_no_tasks_are_refused_with_the_reason(site: Path, tmp_path: Path) -> None:
    good = {"id": "a", "instruction": "Sort.", "files": {"input.txt": "b\n"}, "solution": ["true"]}
    bad = [{**good, "split": "test"}, {**good, "solution": []}, {key: good[key] for key in ("id", "instruction")}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [good, *bad]))
    task, *refused = load_family("sorted_lines").load("s", 0, {"path": str(file)})
    assert isinstance(task, Task)
    assert [item.reason for item in refused if isinstance(item, RejectedInput)] == ["unreadable_row"] * 3


@pytest.mark.parametrize("reward", [1.5, -1, None, "1"])
def test_reward_that_is_no_share_is_an_error(reward: object) -> None:
    family = JudgedRows("odd", lambda task, files, sandboxes: reward)  # pyright: ignore[reportArgumentType]
    task = Task("t", "s", "r", "train", "Sort.", {"files": {}, "solution": []}, "h")
    with pytest.raises(ValueError, match=re.escape(f"odd returned {reward!r} for t")):
        family.judge(task, {"agent1": {}}, BubblewrapFactory())


def test_task_without_files_is_proved() -> None:
    family = JudgedRows("noted", lambda task, files, sandboxes: float(files.get("note") == "moored\n"))
    task = Task("t", "s", "r", "train", "Note.", {"files": {}, "solution": ["echo moored > note"]}, "h")
    assert list(family.validate([task], BubblewrapFactory())) == [task]


def test_name_that_etpi_gives_cannot_be_replaced(site: Path) -> None:
    distribution(site, "greedy", "etpi.rewards", "outcome = own_plugin.rewards:brevity")
    with pytest.raises(SpecError, match=r"'outcome' .*etpi and greedy 1\.0; .*greedy 1\.0,"):
        functions.function_named("outcome")


def test_name_of_two_distributions_is_refused(site: Path) -> None:
    distribution(site, "twin", "etpi.families", "sorted_lines = own_plugin.family:FAMILY")
    with pytest.raises(SpecError, match=r"own-plugin 0\.1\.0 and twin 1\.0|twin 1\.0 and own-plugin 0\.1\.0"):
        load_family("sorted_lines")


@pytest.mark.parametrize(
    ("group", "entry"),
    [
        ("etpi.rewards", "outcome = none:x"),
        ("etpi.families", "terminal_tiny = none:x"),
        ("etpi.families", "sorted_lines = none:x"),
        ("etpi.engines", "vllm = none:x"),
        ("etpi.importers", "absent = none:x"),
    ],
)
def test_plugin_that_a_run_does_not_use_does_not_stop_it(site: Path, group: str, entry: str) -> None:
    distribution(site, "odd", group, entry)
    assert all(versions.asset_version(node) for node in GRAPH.values()), "the page shows every asset"
    assert versions.versions_of(GRAPH["raw_rollouts"], "own_answers", load_specs(EXAMPLE / "specs")).whole


def test_broken_plugin_stops_only_what_names_it(site: Path) -> None:
    (site / "broken_plugin.py").write_text("raise RuntimeError('no licence file')\n")
    distribution(site, "broken", "etpi.families", "broken = broken_plugin:FAMILY")
    assert load_family("sorted_lines").invents_names is False
    assert "broken" in known_families()
    with pytest.raises(SpecError, match=r"broken 1\.0.*RuntimeError: no licence file"):
        load_family("broken")


def test_unknown_names_list_plugins_and_suggest_only_what_is_near(site: Path) -> None:
    for look_up, wrong, right in (
        (load_family, "sorted_line", "sorted_lines"),
        (functions.function_named, "brevit", "brevity"),
    ):
        with pytest.raises(SpecError) as error:
            look_up(wrong)
        assert f"Did you mean '{right}'" in str(error.value)
        with pytest.raises(SpecError) as error:
            look_up("xyzzy")
        assert "Did you mean" not in str(error.value)
        assert right in str(error.value)
