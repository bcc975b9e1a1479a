"""The in-process engine: the same tokens as `transformers` itself, whatever else is in the batch."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines import Completion, Engine, Request, Sampler
from etpi_resources.engines.decode_steps import DecodeSteps
from etpi_resources.engines.slots import ATTENTION, ModelCaches, Slots, attention_by_products
from etpi_resources.engines.transformers import TransformersEngine, _BatchRow, _sample
from tests.support.models import qwen3
from tests.support.students import make_student


@pytest.fixture(scope="module", params=["full attention", "hybrid"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3, and a random Qwen3.5, of whose layers all but one keep a recurrent state."""
    shape: dict[str, Any] = {"num_attention_heads": 4, "initializer_range": 0.3}
    hybrid = request.param == "hybrid"
    if hybrid:
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        shape |= {"num_hidden_layers": 3, "layer_types": kinds, "linear_num_value_heads": 4}
    path = tmp_path_factory.mktemp("model")
    qwen3(len(load_chat_format("tiny").tokenizer), hybrid=hybrid, **shape).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path):
    engine = TransformersEngine(folder, "sft-0123456789ab", load_chat_format("tiny"))
    yield engine
    engine.close()


def _request(name: str, ids: list[int], **sampler) -> Request:
    return Request(f"{name}/0", name, ids, [], Sampler(**{"max_tokens": 24, **sampler}))


def _ids(seed: int, n: int) -> list[int]:
    return torch.randint(10, 800, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_output_equals_generate_of_transformers(engine: TransformersEngine, folder: Path):
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [_ids(i, 5 + 17 * i) for i in range(8)]
    completions = engine.complete([_request(f"g{i}", p) for i, p in enumerate(prompts)])
    chat = load_chat_format("tiny")
    for prompt, completion in zip(prompts, completions, strict=True):
        whole = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=chat.end_id,
            pad_token_id=chat.pad_id,
        )
        assert completion.output_ids == whole[0, len(prompt) :].tolist()
        assert completion.prompt_ids == prompt


def test_logprobs_are_the_models_at_temperature_one(engine: TransformersEngine, folder: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = _ids(3, 30)
    (completion,) = engine.complete([_request("logprobs", prompt, temperature=0.7, seed=5)])
    output = list(completion.output_ids or [])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_sample_does_not_depend_on_the_batch(engine: TransformersEngine):
    alone = engine.complete([_request("solo", _ids(1, 40), temperature=1.0, seed=3)])[0].output_ids
    batch = [_request(f"c{i}", _ids(i + 5, 20 + 9 * i), temperature=1.0, seed=3) for i in range(20)]
    together = engine.complete([*batch, _request("solo", _ids(1, 40), temperature=1.0, seed=3)])[-1].output_ids
    other_seed = engine.complete([_request("solo", _ids(1, 40), temperature=1.0, seed=4)])[0].output_ids
    assert alone == together
    assert alone != other_seed


def test_cached_conversation_equals_one_computed_from_the_beginning(engine: TransformersEngine):
    prompt = _ids(9, 25)
    for turn in range(4):
        (cached,) = engine.complete([Request(f"talk/{turn}", "talk", prompt, [], Sampler(max_tokens=10))])
        (fresh,) = engine.complete([Request(f"talk/{turn}", f"fresh{turn}", prompt, [], Sampler(max_tokens=10))])
        assert cached.output_ids == fresh.output_ids
        prompt = prompt + list(cached.output_ids or []) + _ids(turn, 7)
    # A prompt that differs from the cached ids is computed from the first difference.
    prompt = prompt[:30] + _ids(77, 20)
    (changed,) = engine.complete([Request("talk/x", "talk", prompt, [], Sampler(max_tokens=10))])
    (fresh,) = engine.complete([Request("talk/x", "other", prompt, [], Sampler(max_tokens=10))])
    assert changed.output_ids == fresh.output_ids


def test_idle_slot_between_busy_ones_keeps_its_cache(folder: Path):
    engine = TransformersEngine(folder, "fresh", load_chat_format("tiny"))
    engine._model.set_attn_implementation("sdpa")  # one attention call for all rows, as on a GPU
    prompts = {name: _ids(seed, 20 + 5 * seed) for seed, name in enumerate("abc")}

    def turn(number: int, names: str) -> dict[str, list[int]]:
        requests = [Request(f"{n}/{number}", n, prompts[n], [], Sampler(max_tokens=12)) for n in names]
        return {n: list(c.output_ids or []) for n, c in zip(names, engine.complete(requests), strict=True)}

    outputs = turn(0, "abc")
    prompts = {name: [*prompts[name], *outputs[name], *_ids(40, 3)] for name in "abc"}
    before = list(engine._slots.cached_ids[1])
    turn(1, "ac")  # runs over b's slot as well
    assert engine._slots.cached_ids[1] == before
    cached = turn(2, "b")["b"]
    (fresh,) = engine.complete([Request("b/2", "another", prompts["b"], [], Sampler(max_tokens=12))])
    engine.close()
    assert cached == fresh.output_ids


def test_attention_by_row_equals_attention_of_the_whole_batch(engine: TransformersEngine):
    def complete(how: str) -> list[Completion]:
        requests = [_request(f"{how}{n}", _ids(n, 5 + 40 * n), temperature=n % 2) for n in range(5)]
        return engine.complete([replace(request, request_id=request.request_id[len(how) :]) for request in requests])

    assert engine._attends_by_row
    by_row = complete("by_row")
    engine._model.set_attn_implementation("sdpa")
    try:
        assert not engine._attends_by_row
        batched = complete("batched")
    finally:
        engine._model.set_attn_implementation(ATTENTION)
    assert [c.output_ids for c in by_row] == [c.output_ids for c in batched]
    for one, other in zip(by_row, batched, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_in_fixed_shapes_write_what_other_steps_write(engine: TransformersEngine, temperature: float):
    """The steps that a GPU records as graphs, without the recording."""
    if not isinstance(engine._slots, Slots) or engine._slots.recurrent:
        pytest.skip("a recurrent state has no position that an idle slot could write to")
    asked = [_request(f"a{i}", _ids(i, 3 + 61 * (i % 6)), temperature=temperature) for i in range(40)]
    longer = [_request(f"a{i}", _ids(i, 3 + 61 * i) + _ids(9, 40), temperature=temperature) for i in (4, 1)]
    expected = [engine.complete(requests) for requests in (asked, longer)]
    engine._slots.clear()
    engine._decode_steps = DecodeSteps(engine._slots, engine._decode, torch.device("cpu"), capture=False)
    try:
        same = [engine.complete(requests) for requests in (asked, longer)]
    finally:
        engine._decode_steps = None
    for one, other in zip([*expected[0], *expected[1]], [*same[0], *same[1]], strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_attention_by_products_equals_pytorchs():
    shape, generator = (3, 2, 4, 8), torch.Generator().manual_seed(0)
    query = torch.randn(shape, generator=generator)
    key, value = (torch.randn((3, 2, 20, 8), generator=generator) for _ in range(2))
    mask = torch.arange(20) <= torch.tensor([0, 7, 19])[:, None, None, None]
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attention_by_products(query, key, value, mask, 0.3), expected)


def test_largest_uniform_samples_an_allowed_id(monkeypatch: pytest.MonkeyPatch):
    row = _BatchRow(_request("r", [1], temperature=1.0), torch.Generator())
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.ones(1))  # the worst case of rounding
    forbidden = float("-inf")
    assert _sample([row], torch.tensor([[forbidden, 0.0, 1.0, forbidden]])).tolist() == [1]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_samples_are_those_of_a_distribution_cut_to_its_nucleus(top_p: float):
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    rows = [
        _BatchRow(_request(str(i), [1], temperature=0.7, top_p=top_p), torch.Generator().manual_seed(i))
        for i in range(len(logits))
    ]
    probabilities, order = torch.softmax(logits / 0.7, -1).sort(-1, descending=True)
    cut = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, 0.0).cumsum(-1)
    uniform = torch.stack([torch.rand(1, generator=torch.Generator().manual_seed(i)) for i in range(len(logits))])
    rank = (cut <= uniform * cut[:, -1:]).sum(-1)
    assert len(set(rank.tolist())) > 3
    assert _sample(rows, logits).tolist() == order[torch.arange(len(logits)), rank].tolist()


def test_engine_leaves_attention_of_a_gpu_to_kernels_that_repeat(folder: Path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    TransformersEngine(folder, "sft-0123456789ab", load_chat_format("tiny")).close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_many_threads_with_more_conversations_than_slots_get_the_same_outputs(engine: TransformersEngine):
    expected = [c.output_ids for c in engine.complete([_request(f"t{i}", _ids(i, 10 + i)) for i in range(90)])]
    outputs: list = [None] * 90

    def ask(i: int) -> None:
        outputs[i] = engine.complete([_request(f"t{i}", _ids(i, 10 + i))])[0].output_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == expected


def test_max_tokens_and_the_models_length_bound_a_completion(engine: TransformersEngine):
    (cut,) = engine.complete([_request("cut", _ids(2, 30), max_tokens=3)])
    assert cut.finish_reason == "length" and len(cut.output_ids or []) == 3
    with pytest.raises(ValueError, match=r"empty/0.*0 ids"):
        engine.complete([_request("empty", [])])
    with pytest.raises(ValueError, match="max_model_len"):
        engine.complete([_request("long", _ids(0, 512))])
    (edge,) = engine.complete([_request("edge", _ids(0, 508), max_tokens=50)])
    assert len(edge.output_ids or []) <= 4


def test_engine_has_a_fingerprint_and_refuses_requests_after_close(folder: Path):
    engine = TransformersEngine(folder, "sft-0123456789ab", load_chat_format("tiny"))
    assert isinstance(engine, Engine)
    assert engine.fingerprint() == {"engine": "transformers", "model": "sft-0123456789ab", "dtype": "float32"}
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="sft-0123456789ab"):
        engine.complete([_request("late", [1, 2])])


def test_nucleus_of_one_token_is_greedy(engine: TransformersEngine):
    greedy, narrow = engine.complete(
        [_request("n1", _ids(4, 20)), _request("n2", _ids(4, 20), temperature=1.0, top_p=1e-6)]
    )
    assert greedy.output_ids == narrow.output_ids


# --- grammars ---------------------------------------------------------------------------------------------------------

BOUNDED = ThinkGrammar.of(max_chars=12)


def _grammar_requests(count: int, tail: str, **sampler: Any) -> list[Request]:
    """Make requests at temperature 1 whose prompts end in `tail`, each with the grammar that continues it."""
    chat, requests = load_chat_format("tiny"), []
    for i in range(count):
        prompt = [*_ids(i, 10 + 3 * i), *chat.prompt_ids([{"role": "user", "content": "go"}]), *chat.encode(tail)]
        sampling = Sampler(**{"temperature": 1.0, "max_tokens": 120, "seed": 5, **sampler})
        requests.append(Request(f"{tail}{i}/0", f"{tail}{i}", prompt, [], sampling, BOUNDED.after(prompt, chat)))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["", "<think>", "<think>\n"])
def test_random_model_adheres_with_a_grammar_and_not_without(engine: TransformersEngine, tail: str):
    chat = load_chat_format("tiny")
    requests = _grammar_requests(24, tail)
    free = [replace(request, grammar=None) for request in requests]
    for request, bound, unbound in zip(requests, engine.complete(requests), engine.complete(free), strict=True):
        block = re.compile(request.grammar.pattern() if request.grammar else "")
        output = list(bound.output_ids or [])
        assert block.match(bound.text), bound.text
        # The tags are single tokens of the vocabulary, and the block ends at the first closing tag.
        close = output.index(chat.think_close_id)
        assert block.fullmatch(chat.decode(output[: close + 1]))
        assert output[:close].count(chat.think_open_id) == (tail == "")
        assert not block.match(unbound.text), "the premise: without a grammar the model writes no such block"
    # After the block nothing is constrained: nearly every answer has a token there that the grammar forbids.
    after = [list(c.output_ids or []) for c in engine.complete(requests)]
    assert all(len(ids) > ids.index(chat.think_close_id) + 1 for ids in after)
    assert any("<" in c.text[c.text.index("</think>") + 8 :] for c in engine.complete(requests))


def test_grammar_constrains_only_its_own_request(engine: TransformersEngine):
    (bound,) = _grammar_requests(1, "")
    alone = [
        engine.complete([r])[0].output_ids for r in (bound, _request("solo", _ids(1, 40), temperature=1.0, seed=3))
    ]
    batch = [*_grammar_requests(12, "<think>\n"), bound, _request("solo", _ids(1, 40), temperature=1.0, seed=3)]
    assert [c.output_ids for c in engine.complete(batch)[-2:]] == alone


def test_logprobs_ignore_the_grammar(engine: TransformersEngine, folder: Path):
    """A trainer compares them with the model's own: the mask limits the sample, not the reported probability."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (request,) = _grammar_requests(1, "")
    (completion,) = engine.complete([request])
    output = list(completion.output_ids or [])
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *output]])).logits[0, len(request.prompt_ids) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
    assert min(completion.logprobs or []) < -5, "the premise: the grammar forces what the model would not write"


def test_max_tokens_may_cut_the_block(engine: TransformersEngine):
    (cut,) = engine.complete(_grammar_requests(1, "", max_tokens=5))
    assert cut.finish_reason == "length" and cut.text.startswith("<think>\nST")


@pytest.mark.skipif(find_spec("dashscope") is None, reason="dashscope, which ships the Qwen3 ranks, is not installed")
def test_mask_of_the_qwen3_vocabulary_forbids_padding_and_control_ids():
    from etpi_resources.engines.masks import GrammarMasks

    chat, generator = load_chat_format("qwen3"), torch.Generator().manual_seed(0)
    masks = GrammarMasks(chat)
    state, finished, output = masks.start(BOUNDED), masks.start(BOUNDED), []
    finished.finished = True
    while not state.finished:
        logits = torch.randn(3, 151_936, generator=generator)
        plain = logits.clone()
        masks.apply([None, state, finished], logits)
        assert torch.equal(logits[[0, 2]], plain[[0, 2]])
        output.append(int(logits[1].argmax()))
        assert output[-1] < chat.vocab_size
        state.consume(output[-1])
    assert re.fullmatch(BOUNDED.pattern(), chat.decode(output))
    assert [i for i in output if i in chat.special_ids] == [chat.think_open_id, chat.think_close_id]
    with pytest.raises(RuntimeError, match=f"token {chat.end_id} "):
        masks.start(BOUNDED).consume(chat.end_id)


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("llama3_1", Slots),
        ("qwen3_6", Slots),
        ("gemma3", ModelCaches),
        ("gemma4", ModelCaches),
        ("gpt_oss", ModelCaches),
    ],
)
def test_models_of_every_family_write_what_generate_writes(family: str, cache: type, tmp_path: Path):
    folder = make_student(family, tmp_path)
    chat = load_chat_format(str(folder), str(folder))
    first = chat.prompt_ids([{"role": "user", "content": "Go. " * 80}])  # longer than a sliding window
    engine = TransformersEngine(folder, family, chat)
    try:
        assert type(engine._slots) is cache
        sampler = Sampler(max_tokens=8)
        prompts = [first, first[:9]]
        requests = [Request(f"r{i}", f"s{i}", ids, (), sampler) for i, ids in enumerate(prompts)]
        outputs = [list(c.output_ids or ()) for c in engine.complete(requests)]
        again = [*first, *outputs[0], 5]
        (extended,) = engine.complete([Request("r2", "s0", again, (), sampler)])
    finally:
        engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, output in zip([*prompts, again], [*outputs, list(extended.output_ids or ())], strict=True):
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=sorted(chat.end_ids), pad_token_id=0
        )
        assert whole[0, len(prompt) :].tolist() == output


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=30),
    st.sampled_from(["full_attention", "linear_attention"]),
)
def test_matched_prefix_is_always_cached(conversations, kind):
    slots = Slots(3, [kind], 1, 4, torch.float32, torch.device("cpu"))
    for session, length, variant in conversations:
        slot = slots.acquire(session)
        with pytest.raises(KeyError):
            slots.acquire(session)
        prompt = [variant] * (length // 2) + list(range(length - length // 2))
        before = list(slots.cached_ids[slot])
        matched = slots.match_prefix(slot, prompt)
        assert matched < len(prompt) and before[:matched] == prompt[:matched]
        assert kind == "full_attention" or matched in (0, len(before)), "a state cannot be cut at an earlier position"
        slots.cached_ids[slot].extend(prompt[matched:])
        slots.release(slot)
