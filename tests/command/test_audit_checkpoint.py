"""`etpi audit CHECKPOINT --base B`: each fault of tiny checkpoints and of a local server is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etpi import cli
from etpi.audit.checkpoint import Server, audit_checkpoint
from etpi_resources.chat.format import load_chat_format
from tests.support.models import make_adapter, make_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("audited") / "base", load_chat_format("tiny", "qwen3"))


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return make_adapter(base, base.parent / "adapter")


@pytest.fixture(scope="module")
def merged(base: Path, adapter: Path) -> Path:
    """Return a merged model with its adapter beside it."""
    from etpi_resources.trainers.workers.checkpointing import attach_adapter

    folder = shutil.copytree(base, base.parent / "merged")
    attach_adapter(base, adapter).merge_and_unload().save_pretrained(folder)
    shutil.copytree(adapter, folder / "adapter")
    return folder


@pytest.fixture
def checkpoint(merged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(merged, tmp_path / "checkpoint")


def failed(folder: Path, base: Path, server: Server | None = None) -> set[str]:
    return {outcome.name for outcome in audit_checkpoint(folder, base, server) if not outcome.passed}


def test_nothing_fails_for_a_right_checkpoint_or_adapter(base, adapter, merged):
    names = {outcome.name for outcome in audit_checkpoint(merged, base)}
    of_weights = {"weights_differ_from_base", "adapter_not_zero", "reload_equals_saved"}
    assert names == {"vocabulary_and_template", "ends_turn", "dtype_as_base", *of_weights}
    assert failed(merged, base) == failed(adapter, base) == set()


def _edited(name: str, **values: Any) -> Callable[[Path, Path], None]:
    def edit(folder: Path, base: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def _base_weights(folder: Path, base: Path) -> None:
    shutil.copy(base / "model.safetensors", folder)


def _untrained(folder: Path, base: Path) -> None:
    shutil.rmtree(folder / "adapter")
    _base_weights(folder, base)


def _other_vocabulary(folder: Path, base: Path) -> None:
    file = folder / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(vocabulary))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder, base: (folder / "chat_template.jinja").unlink(), {"vocabulary_and_template"}),
        (_other_vocabulary, {"vocabulary_and_template"}),
        (_edited("generation_config.json", eos_token_id=0), {"ends_turn"}),
        (_edited("config.json", dtype="bfloat16"), {"dtype_as_base"}),
        (_base_weights, {"reload_equals_saved"}),
        (_untrained, {"weights_differ_from_base"}),
    ],
    ids=["template", "vocabulary", "end", "dtype", "merge", "untrained"],
)
def test_fault_of_files_is_found(change, expected, checkpoint, base):
    change(checkpoint, base)
    assert failed(checkpoint, base) == expected


def test_adapter_of_zeros_is_found(base, tmp_path):
    assert failed(make_adapter(base, tmp_path / "zeros", zeros=True), base) == {
        "adapter_not_zero", "weights_differ_from_base",
    }  # fmt: skip


@pytest.fixture
def server(base: Path, monkeypatch) -> Iterator[Any]:
    from tests.support.fake_vllm import FakeVllm

    for variable in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(variable, "1")
    with FakeVllm(base, "base", sleeps=True) as running:
        yield running


def load(server: Any, name: str, adapter: Path) -> Server:
    server.answer("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
    return server.url, name, None


def test_loaded_adapter_is_proved_by_its_answers(server, base, adapter, merged):
    tuned = load(server, "tuned", adapter)
    assert failed(adapter, base, tuned) == failed(merged, base, tuned) == set()


def test_server_that_serves_something_else_is_found(server, base, adapter, tmp_path):
    assert failed(adapter, base, (server.url, "tuned", None)) == {"served_name"}
    server.deaf = True  # it says that it loaded the adapter
    assert failed(adapter, base, load(server, "tuned", adapter)) == {"differs_from_base"}
    server.answer("/v1/unload_lora_adapter", {"lora_name": "tuned"})
    server.deaf = False
    other = make_adapter(base, tmp_path / "other", seed=2)
    assert failed(adapter, base, load(server, "tuned", other)) == {"differs_from_base"}
    server.asleep = {"weights"}
    assert failed(adapter, base, (server.url, "tuned", None)) == {"ids_returned"}


def test_server_without_ids_is_found(server, base, adapter):
    def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer.get("choices", ()):
            choice.pop("token_ids", None)
        return answer

    tuned = load(server, "tuned", adapter)
    server.change = without_ids
    assert failed(adapter, base, tuned) == {"ids_returned"}


def test_exit_status_and_json(base, adapter, checkpoint, capsys):
    command = ["audit", str(checkpoint), "--base", str(base), "--json"]
    assert cli.main(command) == 0 and json.loads(capsys.readouterr().out)["failed"] == []
    _base_weights(checkpoint, base)
    assert cli.main(command) == 1 and json.loads(capsys.readouterr().out)["failed"] == ["reload_equals_saved"]
    assert cli.main([*command, "--model", str(base)]) == cli.main([*command, "--name", "tuned"]) == 2
    assert cli.main([*command, "--page", "x.html"]) == 2
    assert cli.main(["audit", str(adapter.parents[1]), "--base", str(base)]) == 2
