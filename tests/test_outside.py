"""JSON and TOML of strangers nested too deep are errors that each reader expects, and other programs' files too."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

from etpi import model_facts
from etpi.audit.examine import _schema_fault
from etpi.view.conversation import _list
from etpi.view.pages import rollout
from etpi_assets.agent.interpreter import cell_of
from etpi_assets.importers import atif, calls, spec
from etpi_assets.scoring.entities import _editor_call
from etpi_assets.tasks import r2e, swe_bench
from etpi_assets.tasks.answers import programs
from etpi_assets.tasks.family import Rejected
from etpi_assets.tasks.harbor import folder, verifier
from etpi_assets.worlds.calls import _report
from etpi_resources.capture import conversation, dialects
from etpi_resources.chat.format import TemplateRefuses, load_chat_format
from etpi_resources.chat.sources import token_texts, tokenizer_folder
from etpi_resources.checkpoints import context_length
from etpi_resources.lake.exchange import journals
from etpi_resources.lake.exchange.bucket import Index
from etpi_resources.lake.manifest import LakeError
from etpi_resources.outside import Unreadable, loads, read_json, read_object, read_toml
from etpi_resources.rows.bounded import Unreadable as Refused
from tests.support.rollouts import planning_pair

DEEP = "[" * 5000 + "]" * 5000
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda: cell_of(f"code_interpreter {DEEP}"), ""),
        (lambda: programs._value(f"mark{DEEP}", "mark"), None),
        (lambda: verifier._reward({"reward.json": DEEP, "reward.txt": "1"}, "")[0], 1.0),
        (lambda: verifier._reward({"reward.json": f'{{"reward": 1{"0" * 400}}}', "reward.txt": "0"}, "")[0], 0.0),
        (lambda: _report(f"job {DEEP}"), ("job", {})),
        (lambda: _editor_call(f'str_replace_editor {{"a": {DEEP}}}'), []),
        (lambda: spec.json_value(DEEP), None),
        (lambda: calls._decoded(f'"{DEEP}'), f'"{DEEP}'),
        (lambda: atif._typed(f'{{"commands": {DEEP}}}'), None),
        (lambda: conversation.parse_json(DEEP), DEEP),
        (lambda: dialects._arguments({"function": {"arguments": DEEP}}), {}),
        (lambda: dialects._arguments({"function": {"arguments": "{cut"}}), {}),
        (lambda: _list(DEEP), []),
        (lambda: rollout.loads(DEEP), DEEP),
    ],
)
def test_text_nested_too_deep_is_read_as_no_json(read, value):
    assert read() == value


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda path: loads(DEEP), Unreadable),
        (lambda path: read_object(path), Unreadable),
        (lambda path: list(journals._lines(path)), LakeError),
        (lambda path: r2e._mapping({"key": DEEP}, "key"), ValueError),
        (lambda path: swe_bench._names({"key": DEEP}, "key"), ValueError),
        (lambda path: calls.json_text(DEEP, "x"), Refused),
        (lambda path: context_length(path), ValueError),
        (lambda path: read_toml(f"key = {DEEP}"), Unreadable),
        (lambda path: Index.of(gzip.compress(b'{"format": 1e999}'), "bucket"), LakeError),
        (lambda path: Index.of(gzip.compress(b'{"format": 1, "x": ' + DEEP.encode() + b"}"), "bucket"), LakeError),
    ],
)
def test_file_nested_too_deep_is_refused(tmp_path, read, error):
    path = tmp_path / "file"
    path.write_text(DEEP + "\n")
    with pytest.raises(error):
        read(path)


def test_task_with_a_key_of_many_parts_is_refused(tmp_path):
    (tmp_path / "task.toml").write_text(".".join("a" * 100_000) + " = 1")
    with pytest.raises(Rejected, match="100 parts"):
        folder._config(tmp_path, tmp_path / "task.toml")


CHARSMAP = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
"""The library panics over it."""
TOKENIZERS = {
    "a list as configuration": {"tokenizer_config.json": "[]"},
    "a deep configuration": {"tokenizer_config.json": DEEP},
    "a configuration of other bytes": {"tokenizer_config.json": "\udcff"},
    "a number as template": {"chat_template.jinja": None, "tokenizer_config.json": '{"chat_template": 5}'},
    "numbers as templates": {"chat_template.jinja": None, "tokenizer_config.json": '{"chat_template": [5]}'},
    "a number as default": {"chat_template.jinja": None, "chat_template.json": '{"chat_template": {"default": 5}}'},
    "a panic": {"tokenizer.json": CHARSMAP},
    "a faulty pattern": {"tokenizer.json": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}},
    "a text that grows": {
        "tokenizer.json": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 5,
            }
        }
    },
    "a cut tokenizer": {"tokenizer.json": "{"},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_faulty_file_of_a_tokenizer_is_an_expected_error(tmp_path, kind):
    shipped = tokenizer_folder("tiny") / "tokenizer.json"
    shutil.copy(shipped, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for name, text in TOKENIZERS[kind].items():
        if isinstance(text, dict):
            text = json.dumps({**json.loads(shipped.read_text()), **text})
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((OSError, ValueError), match=str(tmp_path)):
        load_chat_format(str(tmp_path))


def test_tokenizer_with_an_id_of_billions_has_no_tables(tmp_path):
    tokenizer = json.loads((tokenizer_folder("tiny") / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 4_294_967_290
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ValueError, match="4,294,967,290"):
        token_texts(str(tmp_path))
    with pytest.raises(ValueError, match="4,294,967,290"):
        _ = load_chat_format(str(tmp_path)).vocab_size


def test_conversation_with_every_private_character_is_refused():
    text = "".join(map(chr, range(0xE000, 0xF900))) + "<|im_end|>"
    with pytest.raises(TemplateRefuses):
        load_chat_format("tiny").prompt_ids([{"role": "user", "content": text}])


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "9" * 400 + ".5", "NaN", "Infinity"])
def test_number_without_a_finite_value_is_none(number):
    assert read_json(f'{{"a": {number}, "b": 1e-999, "c": 1e300}}'.encode(), 100) == {"a": None, "b": 0.0, "c": 1e300}


@pytest.mark.parametrize("data", [b"short", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_faulty_file_of_weights_is_a_finding(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert "cannot be read" in (model_facts._weights(tmp_path).problem or "")


@pytest.mark.parametrize(
    ("text", "context"),
    [('{"max_position_embeddings": "8"}', None), ('{"text_config": 5, "max_position_embeddings": 8}', 8),
     ('{"text_config": {"max_position_embeddings": 4}, "max_position_embeddings": 8}', 4)],
)  # fmt: skip
def test_context_of_a_configuration_is_a_whole_number(tmp_path, text, context):
    (tmp_path / "config.json").write_text(text)
    assert context_length(tmp_path / "config.json") == context


def test_deep_schema_of_a_row_is_no_fault():
    assert _schema_fault({"tools": DEEP}, planning_pair(), padded=False) is None
