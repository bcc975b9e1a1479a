"""A folder whose tokenizer_config.json names a class with rules of its own is read as its tokenizer.json says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from etpi_resources.chat.format import load_chat_format, same_vocabulary
from etpi_resources.chat.sources import token_texts
from etpi_resources.chat.tokenizer_files import PROBE, TOKENIZER_CONFIG, copy_tokenizer, misread, read_tokenizer
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE, VllmServer
from etpi_resources.trainers.workers import grpo_worker
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.sharding import load_start
from tests.support.policy_updates import FixedLink, worker_in
from tests.support.students import FAMILIES, byte_tokenizer, make_student


def named(folder: Path, tokenizer_class: str) -> Path:
    file = folder / TOKENIZER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary whose folder names LlamaTokenizerFast, as DeepSeek-R1-0528-Qwen3-8B does."""
    return named(make_student("qwen3", tmp_path_factory.mktemp("base")), "LlamaTokenizerFast")


def test_copied_files_give_the_ids_of_tokenizer_json_to_everyone(base, tmp_path):
    ids = read_tokenizer(base).encode(PROBE, add_special_tokens=False)
    assert misread(base) and AutoTokenizer.from_pretrained(base).encode(PROBE, add_special_tokens=False) != ids
    copy_tokenizer(base, tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert not misread(tmp_path) and auto.encode(PROBE, add_special_tokens=False) == ids and auto.decode(ids) == PROBE


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_only_a_name_that_transformers_4_does_not_know_is_replaced(tmp_path, tokenizer_class):
    source, copy = named(make_student("qwen3", tmp_path / "source"), tokenizer_class), tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(source, copy)
    config, before = (json.loads((folder / TOKENIZER_CONFIG).read_text()) for folder in (copy, source))
    assert config == before | {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_policy_reads_and_writes_the_text_of_the_student_s_format(base, tmp_path):
    worker = worker_in(tmp_path, base)
    compute = Compute(False, "fp32")
    _, engine = grpo_worker.build_trainer(
        worker, load_start(worker.config.base, 1, compute, lora=False), FixedLink([]), compute=compute
    )
    chat, messages = load_chat_format(str(base)), [{"role": "user", "content": PROBE}]
    assert engine._chat.prompt_ids(messages) == chat.prompt_ids(messages)


@pytest.mark.parametrize("options", [{}, {"tokenizer": "own"}])
def test_server_gets_a_tokenizer_that_it_reads_rightly(base, tmp_path, monkeypatch, options):
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "Error: $*"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    for folder, wanted in ((base, "log.tokenizer"), (make_student("qwen3", tmp_path / "plain"), "")):
        with pytest.raises(EngineUnavailable) as caught:
            VllmServer(folder, "m", log=tmp_path / "log", options=options)
        given = str(caught.value).partition("--tokenizer ")[2].split(" ")[0]
        assert Path(given).name == options.get("tokenizer", wanted)
    assert options or not misread(tmp_path / "log.tokenizer")


def test_vocabularies_are_compared_by_content(base, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    assert same_vocabulary(str(base), str(other)) and same_vocabulary("tiny", "tiny")
    assert not same_vocabulary(str(base), "tiny") and not same_vocabulary("tiny", str(tmp_path / "nothing"))


def test_texts_of_ids_need_no_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(FAMILIES["llama3_1"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert token_texts(str(tmp_path))[-3:] == ["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
    tiny = load_chat_format("tiny")
    assert token_texts("tiny") == [tiny.decode([number]) for number in range(tiny.vocab_size)]
