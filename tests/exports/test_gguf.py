"""GGUF exports: the real converter's result, if it is installed, and the errors if it is missing or fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from etpi.cli import main
from etpi_resources.chat.format import load_chat_format
from etpi_resources.gguf_converter import CONVERTER_VARIABLE, NotConverted, convert, converter
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import BlockedInput, MissingInput
from tests.support.models import make_base
from tests.support.trained import Trained

STAND_IN = """
import json, os, sys
from pathlib import Path
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
result = {"model": sys.argv[1], "environment": dict(os.environ), **arguments}
result["--metadata"] = json.loads(Path(arguments["--metadata"]).read_text())
Path(arguments["--outfile"]).write_text(json.dumps(result))
"""


def missing() -> str | None:
    """Return why the real converter cannot be tested here; None if it can."""
    try:
        converter()
    except NotConverted as error:
        return str(error)
    wanted = {"gguf": "which reads GGUF", "dashscope": "which ships the Qwen3 ranks"}
    return next((f"{name}, {what}, is not installed" for name, what in wanted.items() if find_spec(name) is None), None)


needs_converter = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder with the files of a checkpoint."""

    def save(name: str, **config: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_text(name)
        return folder

    return save


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the converter by a script."""

    def put_in_place(script: str) -> None:
        (tmp_path / "convert_hf_to_gguf.py").write_text(script)
        monkeypatch.setenv(CONVERTER_VARIABLE, str(tmp_path / "convert_hf_to_gguf.py"))

    return put_in_place


# --- the real converter ---------------------------------------------------------------------------------------------


@needs_converter
@pytest.mark.slow
def test_conversion_keeps_tensors_vocabulary_template_and_origin(trained: Trained, tmp_path: Path) -> None:
    import gguf
    from safetensors.numpy import load_file

    chat = load_chat_format("qwen3")
    trained.put("sft", folder := make_base(tmp_path / "model", chat))
    trained.put("rl")
    weights = load_file(next(trained.lake.root.glob("checkpoints/*/model.safetensors")))
    assert not folder.exists(), "moved into the lake"
    loaded = gguf.GGUFReader(trained.export("gguf") / "first-sft-seed0.gguf")

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    expected = {names.get_name(name, (".weight",)): array for name, array in weights.items()}
    tensors = {tensor.name: tensor.data for tensor in loaded.tensors}
    assert set(tensors) == set(expected) and len(tensors) == 24
    assert all(tensors[name].dtype == array.dtype for name, array in expected.items())
    assert all((tensors[name].reshape(array.shape) == array).all() for name, array in expected.items())

    def field(name: str):
        return loaded.fields[name].contents()

    tokens = field("tokenizer.ggml.tokens")
    assert tokens[: chat.vocab_size] == chat.tokenizer.convert_ids_to_tokens(list(range(chat.vocab_size)))
    assert (field("tokenizer.ggml.pre"), field("tokenizer.ggml.eos_token_id")) == ("qwen2", chat.end_id)
    assert field("tokenizer.chat_template") == chat.template
    assert (field("general.architecture"), field("qwen3.block_count")) == ("qwen3", 2)
    assert "experiment first, sft, seed 0, step 10, checkpoint " in field("general.description")


@needs_converter
@pytest.mark.slow
def test_unknown_tokenizer_is_refused(trained: Trained, tmp_path: Path) -> None:
    trained.put("sft", make_base(tmp_path / "model", load_chat_format("tiny")))
    trained.put("rl")
    with pytest.raises(NotConverted, match="tokenizer"):
        trained.export("gguf")
    assert not (tmp_path / "out").exists()


# --- what is asked of it --------------------------------------------------------------------------------------------


def test_last_stage_is_exported_as_one_file_per_seed(trained: Trained, saved, stand_in, monkeypatch) -> None:
    for name in ("HF_TOKEN", "PYTHONPATH", "ETPI_DATA"):
        monkeypatch.setenv(name, "secret")
    stand_in(STAND_IN)
    trained.put("sft", saved("a", dtype="float32"))
    trained.put("rl", saved("b", dtype="bfloat16"), saved("c"))
    out = trained.export("gguf")
    told = {path.name: json.loads(path.read_text()) for path in out.glob("*.gguf")}
    assert set(told) == {"first-rl-seed0.gguf", "first-rl-seed1.gguf"}
    assert [told[name]["--outtype"] for name in sorted(told)] == ["bf16", "auto"]
    one = told["first-rl-seed1.gguf"]
    identity = Path(one["model"]).name
    assert (Path(one["model"]) / "model.safetensors").read_text() == "c"
    assert one["--metadata"]["general.description"].endswith(f"rl, seed 1, step 10, checkpoint {identity}")
    assert one["environment"]["HF_HUB_OFFLINE"] == "1" and "secret" not in one["environment"].values()
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["versions"]) == {"sft_checkpoint/first", "rl_checkpoint/first"}


def test_a_command_names_the_interpreter_too(saved, stand_in, monkeypatch, tmp_path: Path) -> None:
    stand_in(STAND_IN)
    script = tmp_path / "convert_hf_to_gguf.py"
    monkeypatch.setenv(CONVERTER_VARIABLE, f"{sys.executable} '{script}'")
    assert converter() == [sys.executable, str(script)]
    monkeypatch.delenv(CONVERTER_VARIABLE)
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert converter() == [str(script)]
    saved("a", dtype="float16")
    monkeypatch.chdir(tmp_path)
    convert(Path("a"), Path("a.gguf"), {})
    assert json.loads((tmp_path / "a.gguf").read_text())["--outtype"] == "f16"


# --- what is refused ------------------------------------------------------------------------------------------------


def test_error_shows_the_last_lines_of_the_converter(trained: Trained, saved, stand_in, tmp_path: Path) -> None:
    trained.put("sft", saved("a"))
    trained.put("rl")
    refusal = "ERROR: Model OddForCausalLM is not supported"
    stand_in(f"import sys\nfor i in range(99): print('line', i)\nsys.exit('{refusal}')")
    with pytest.raises(NotConverted, match=r"(?s)status 1.*line 98\n.*OddForCausalLM") as refused:
        trained.export("gguf")
    assert "line 80\n" not in str(refused.value)
    stand_in("print('done')")
    with pytest.raises(NotConverted, match="without a file"):
        trained.export("gguf")
    assert not (tmp_path / "out").exists()


def test_missing_converter_is_reported(trained: Trained, saved, monkeypatch, capsys) -> None:
    trained.put("sft", saved("a"))
    trained.put("rl")
    monkeypatch.setenv("ETPI_DATA", str(trained.lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(trained.folder / "specs"))
    monkeypatch.setenv(CONVERTER_VARIABLE, "/nowhere/convert_hf_to_gguf.py")
    assert main(["export", "first", "--format", "gguf", "--to", str(trained.folder / "out")]) == 1
    error = capsys.readouterr().err
    assert "/nowhere/convert_hf_to_gguf.py" in error and CONVERTER_VARIABLE in error


def test_adapter_without_its_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotConverted, match="adapter"):
        convert(tmp_path, tmp_path / "a.gguf", {})


def test_experiment_without_current_checkpoint_is_refused(trained: Trained, saved) -> None:
    with pytest.raises(MissingInput, match="rl_checkpoint"):
        trained.export("gguf")
    trained.put("sft")
    trained.put("rl")
    with pytest.raises(NotConverted, match="trains nothing"):
        trained.export("gguf")
    trained.put("rl", saved("a"), checks=(CheckOutcome("sound", False, "it is not"),))
    with pytest.raises(BlockedInput, match="sound"):
        trained.export("gguf")
