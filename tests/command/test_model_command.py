"""`etpi model`: the `[base]` section, the facts of a model's files, and the template's report."""

from __future__ import annotations

import tomllib
from pathlib import Path

from click.testing import CliRunner

from etpi import cli
from etpi_assets.specs.training import BaseSection
from etpi_resources.lake.lake import folder_hash
from tests.support.tiny_training import make_speaking_base


def test_folder_s_base_section_can_be_pasted_into_a_spec(tmp_path: Path) -> None:
    folder = make_speaking_base(tmp_path / "model")
    done = CliRunner().invoke(cli.etpi, ["model", str(folder)])
    section, _, report = done.output.partition("\n\n")
    base = BaseSection.model_validate(tomllib.loads(section)["base"])
    assert (base.kind, base.path, base.sha256) == ("path", str(folder), folder_hash(folder))
    assert "parameters in F32" in report and "context" in report and "512 tokens" in report
    assert CliRunner().invoke(cli.etpi, ["template", str(folder)]).output == done.output


def test_message_names_no_option_that_the_command_does_not_have() -> None:
    done = CliRunner().invoke(cli.etpi, ["model", "nowhere"])
    assert "--model" not in str(done.exception) and "package:" in str(done.exception)


def test_weights_that_are_no_safetensors_are_named_as_what_does_not_work(tmp_path: Path) -> None:
    folder = make_speaking_base(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    done = CliRunner().invoke(cli.etpi, ["model", str(folder)])
    assert "does not work: weights: weights must be in safetensors" in done.output
