"""A dry run lists what a run would make, why and at what cost, and makes nothing."""

from __future__ import annotations

from etpi_assets.planning.dry_run import describe
from etpi_assets.planning.planner import plan


def lines(world, *names, consent=()) -> list[str]:
    specs = world.resources().specs
    return list(describe({name: plan(name, specs, world.lake) for name in names}, specs, world.lake, consent))


def listed(text: list[str], heading: str) -> list[str]:
    """Return the partitions under the heading that starts so."""
    start = next((i for i, line in enumerate(text) if line.strip().startswith(heading)), None)
    if start is None:
        return []
    names = []
    for line in text[start + 1 :]:
        if not line.startswith("  "):
            break
        names.append(line.split("  ")[1].strip())
    return names


def test_dry_run_of_an_empty_lake_lists_every_step_and_makes_nothing(world):
    text = lines(world, "first")
    created = world.make_all()
    assert text[0].startswith("first: 18 of 18 steps would run;")
    assert {name.split(" of ")[0] for name in listed(text, "Would run, in")} >= {
        asset for asset, key in created if key != "all"
    }
    assert text[-1].strip() == "Nothing was run."


def test_dry_run_names_the_changed_key_and_the_last_cost(world):
    world.make_all()
    file = world.specs_folder / "rollout_sets" / "few.toml"
    file.write_text(file.read_text() + "k = 4\n")
    text = "\n".join(lines(world, "first"))
    assert "raw_rollouts of few" in text and "k 1 → 4" in text and "last time" in text
    assert "engine scripted" in text
    assert "scored_rollouts of few" in listed(text.splitlines(), "Would run if")


def test_dry_run_of_changed_code_reports_that_the_run_would_stop(world, code):
    world.make_all()
    world.made.clear()
    code["raw_rollouts"] = code["raw_rollouts kept"] = "2"
    text = "\n".join(lines(world, "first"))
    assert "would stop" in text and "--recollect" in text
    assert "would stop" not in "\n".join(lines(world, "first", consent=("recollect", "rebuild")))
    assert world.made == []


def test_dry_run_of_two_experiments_lists_a_shared_step_once(world):
    world.make_all("first")
    text = lines(world, "first", "second")
    assert "raw_rollouts of few" in listed(text, "Expensive and up to date")
    assert sum("raw_rollouts of few  " in line for line in text) == 1
    assert text[0].startswith("first, second: ")
