"""The folders of a user's specs: where they are, what in them would not be read, and names that occur twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etpi import cli
from etpi.run.console_table import folders_table
from etpi_assets.specs.folders import plugin_folders, user_folders
from etpi_assets.specs.load import SpecError, load_installed, load_shipped, load_specs
from tests.support.graph import small_world, write_spec

MINE = 'extends = "plan_first_tiny"\ntitle = "mine"\n'


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_specs_in_the_working_folder_are_read_by_default(cwd):
    assert "mine" not in load_specs().keys("experiment")
    write_spec(cwd / "specs", "experiments", "mine", MINE)
    assert load_specs().experiments["mine"].title == "mine"


def test_unrelated_specs_folder_is_not_read(cwd):
    (cwd / "specs" / "models").mkdir(parents=True)
    (cwd / "specs" / "models" / "user_spec.rb").write_text("")
    assert user_folders() == []
    assert "plan_first_tiny" in load_specs().keys("experiment")


def test_variable_names_several_folders_and_overrides_the_default(cwd, monkeypatch):
    write_spec(cwd / "specs", "experiments", "by_default", MINE)
    for folder in ("a", "b"):
        write_spec(cwd / folder, "experiments", f"in_{folder}", MINE)
    monkeypatch.setenv("ETPI_SPECS", os.pathsep.join(("a", "b")))
    names = set(load_specs().keys("experiment"))
    assert {"in_a", "in_b"} <= names and "by_default" not in names


@pytest.mark.parametrize(
    ("file", "named", "remedy"),
    [
        ("specs/mine.toml", "specs", "experiments/"),
        ("specs/experiment/mine.toml", "specs", "has none of"),
        ("specs/experiments/suites/mine.toml", "specs", "one level too deep"),
        ("specs/experiments/mine.toml", "specs/experiments", "name {}/specs"),
        ("specs/experiments/mine.toml", ".", "name {}/specs"),
        ("specs/experiments/mine.toml", "gone", "does not exist"),
    ],
)
def test_file_that_would_not_be_read_is_an_error_with_remedy(cwd, monkeypatch, file, named, remedy):
    path = cwd / file
    path.parent.mkdir(parents=True)
    path.write_text(MINE)
    monkeypatch.setenv("ETPI_SPECS", named)
    with pytest.raises(SpecError) as raised:
        load_specs()
    assert remedy.format(cwd) in str(raised.value) and str(cwd) in str(raised.value)


def test_misspelt_subfolder_is_an_error_that_names_the_right_one(cwd):
    write_spec(cwd / "specs", "suites", "ok", 'extends = "coop_tiny_shared"\n')
    write_spec(cwd / "specs", "experiment", "mine", MINE)
    with pytest.raises(SpecError, match=r"experiment/mine\.toml.*experiments/"):
        load_specs()


def test_subfolders_group_files(cwd):
    write_spec(cwd / "specs", "experiments/tried", "mine", MINE)
    assert "mine" in load_specs().experiments


def test_name_of_a_shipped_spec_is_an_error_for_it_and_for_specs_that_extend_it(cwd):
    write_spec(cwd / "specs", "experiments", "plan_first_tiny", MINE)
    write_spec(cwd / "specs", "experiments", "mine", MINE)
    specs = load_specs()
    for name in ("plan_first_tiny", "mine"):
        assert str(cwd / "specs/experiments/plan_first_tiny.toml") in str(specs.entry("experiment", name).error)


def test_name_in_two_folders_is_an_error(cwd, monkeypatch):
    for folder in ("a", "b"):
        write_spec(cwd / folder, "experiments", "mine", MINE)
    monkeypatch.setenv("ETPI_SPECS", os.pathsep.join(("a", "b")))
    assert "occurs twice" in str(load_specs().entry("experiment", "mine").error)


def test_status_shows_each_folder_with_its_counts_and_faults(cwd, capsys):
    small_world(cwd / "specs")
    write_spec(cwd / "specs", "experiments", "broken", "title = ")
    text = folders_table(user_folders(), load_specs())
    assert f"{cwd}/specs" in text and "1 suites, 1 rollout_sets, 3 experiments, 1 invalid" in text
    assert "broken.toml: not TOML" in text
    Path("specs/stray.toml").write_text(MINE)
    assert cli.main(["status", "first"]) == 1
    assert "stray.toml" in capsys.readouterr().out


@pytest.fixture
def plugin(tmp_path_factory, monkeypatch):
    """A function that installs a distribution whose package `theirs.specs` holds specs; returns that folder."""
    site = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(site))

    def install(package="theirs.specs"):
        info = site / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[etpi.specs]\ntheirs = {package}\n")
        plugin_folders.cache_clear()
        return site / "theirs" / "specs"

    yield install
    monkeypatch.undo()
    plugin_folders.cache_clear()


def test_specs_of_a_plugin_are_read_and_may_be_extended(cwd, plugin):
    folder = plugin()
    write_spec(folder, "experiments", "theirs", MINE)
    write_spec(cwd / "specs", "experiments", "mine", 'extends = "theirs"\ntitle = "mine after theirs"\n')
    specs = load_specs()
    assert specs.experiments["mine"].title == "mine after theirs"
    assert [folder.path for folder in specs.folders] == [cwd / "specs"], "a plugin's folder is none of the user's"
    assert "theirs" in load_installed().experiments and "mine" not in load_installed().experiments
    assert "theirs" not in load_shipped().experiments
    write_spec(cwd / "specs", "experiments", "theirs", MINE)
    with pytest.raises(SpecError, match="plugin"):
        load_specs().get("experiment", "theirs")


def test_plugin_without_its_specs_is_named(cwd, plugin):
    plugin("theirs.gone")
    with pytest.raises(SpecError, match=r"plugin theirs .*theirs\.gone"):
        load_specs()
