"""Requests to servers that fail: bounded retries, load balancing, failover, and errors that name a remedy."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable, Request, Sampler
from etpi_resources.engines import endpoints as module
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.openai import OpenAIEngine
from etpi_resources.engines.vllm import VllmEngine, reload_weights, same_text
from tests.support.faulty_server import NAME, FaultyServer
from tests.support.loopback import SUBMITS, Loopback, Refusal, drop, echo_key, hang, status

CHAT = load_chat_format("tiny")
MESSAGES = [{"role": "user", "content": "hello"}]
BODY = {"prompt": [1, 2, 3]}


def ask(number: int = 0, session: str = "s", **more) -> Request:
    return Request(f"r{number}/{session}", session, CHAT.prompt_ids(MESSAGES), MESSAGES, Sampler(), **more)


@pytest.fixture
def server():
    with Loopback() as server:
        yield server


def endpoints(*servers: Loopback, **options) -> Endpoints:
    return Endpoints([server.url for server in servers], **{"backoff": 0.01, "timeout": 5.0, **options})


def vllm(*servers: Loopback, request="tokens", **options) -> VllmEngine:
    return VllmEngine(endpoints(*servers, **options), "teacher", CHAT, request=request)


@pytest.mark.parametrize("fault", [status(429), status(500), status(503), drop])
def test_transient_fault_is_retried(server, fault):
    server.faults = [fault, fault, None]
    assert vllm(server).complete([ask()])[0].finish_reason == "stop"
    assert len(server.seen) == 3


def test_retry_waits_as_long_as_retry_after(server):
    server.faults = [status(429, **{"retry-after": "0.4"}), None]
    start = time.monotonic()
    vllm(server).complete([ask()])
    assert time.monotonic() - start >= 0.4


@pytest.mark.parametrize("fault", [status(429, "slow down"), drop])
def test_engine_is_unavailable_after_the_last_try(server, fault):
    engine, server.always = vllm(server, attempts=3), fault
    with pytest.raises(EngineUnavailable, match="3 tries"):
        engine.complete([ask()])
    assert len(server.seen) == 3


def test_request_that_a_healthy_server_fails_on_is_an_error_of_that_request(server):
    engine, server.always = vllm(server, attempts=3), status(500, "index out of range")
    with pytest.raises(RuntimeError, match="index out of range") as caught:
        engine.complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable)


def test_timed_out_request_is_tried_twice(server):
    engine, server.always = vllm(server, timeout=0.3), hang
    start = time.monotonic()
    with pytest.raises(EngineUnavailable, match="0.3 s"):
        engine.complete([ask()])
    assert len(server.seen) == 2 and time.monotonic() - start < 5


def test_refused_request_is_not_retried(server):
    engine, server.always = vllm(server), status(400, "This model's maximum context length is 8")
    with pytest.raises(RuntimeError, match="maximum context length") as caught:
        engine.complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable) and len(server.seen) == 1


def test_requests_at_once_have_clients_of_one_connection_each_which_later_ones_use(server):
    together = threading.Barrier(4)
    server.say = lambda body: SUBMITS if together.wait(60) >= 0 else ""
    served = endpoints(server)
    engine = VllmEngine(served, "teacher", CHAT)
    for _ in range(2):
        engine.complete([ask(number) for number in range(4)])
    assert len(served._idle_clients) == len(server.connections) == 4


def test_load_is_balanced_and_a_conversation_stays_with_its_server(server):
    with Loopback() as other:
        server.delay = other.delay = 0.05
        engine = vllm(server, other)
        for turn in range(3):
            engine.complete([ask(turn, f"s{number}") for number in range(8)])
        where = [{body["seed"] for _, body in s.seen} for s in (server, other)]
        assert len(server.seen) == len(other.seen) == 12 and not where[0] & where[1]


def test_dead_server_is_excluded_and_used_again_once_healthy(server, monkeypatch):
    monkeypatch.setattr(module, "EXCLUDE_SECONDS", 0.2)
    other = Loopback()
    with other:
        engine = vllm(server, other)
        engine.complete([ask(0, f"s{number}") for number in range(8)])
        assert server.seen and other.seen
    before = len(server.seen)
    assert len(engine.complete([ask(1, f"s{number}") for number in range(8)])) == 8
    assert len(server.seen) - before == 8
    with Loopback(port=other.port) as restarted:
        time.sleep(1.2)  # it failed more than once, and each failure doubles the time
        deadline = time.monotonic() + 10
        while not restarted.seen and time.monotonic() < deadline:
            engine.complete([ask(2, f"new{time.monotonic()}-{number}") for number in range(4)])
        assert restarted.seen


def test_error_gives_the_exit_reason_of_a_server_of_this_process(server):
    engine = vllm(server, exit_reason=lambda: "the vLLM server of teacher was ended by signal 9")
    server.always = drop
    with pytest.raises(EngineUnavailable, match="signal 9"):
        engine.complete([ask()])
    assert len(server.seen) == 1


@pytest.mark.parametrize("request_kind", ["tokens", "chat"])
@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids"])
def test_answer_without_ids_raises_with_the_remedy(server, request_kind, missing):
    def change(answer):
        answer.pop(missing, None)
        answer["choices"][0].pop(missing, None)
        return answer

    server.change = change
    with pytest.raises(EngineUnavailable, match=rf"{missing}.*return_token_ids.*retokenised"):
        vllm(server, request=request_kind).complete([ask()])


def test_server_that_truncates_prompts_is_refused(server):
    server.prompt_of = lambda body: body["prompt"][2:]
    with pytest.raises(EngineUnavailable, match="8 ids.* 10 "):
        vllm(server).complete([ask()])


@pytest.mark.parametrize("only", ["null", "no choice", "cut stream"])
def test_answer_without_a_choice_is_retried(only):
    with FaultyServer(rate=1.0, only=only) as server:
        engine = VllmEngine(endpoints(server, attempts=3), NAME, CHAT)
        with pytest.raises((EngineUnavailable, RuntimeError), match="3 tries"):
            engine.complete([ask()])


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("ids of another text", "r0/s"),
        ("ids beyond the vocabulary", "13 to 1031.* 1024"),
        ("another model", "'somebody-else'"),
    ],
)
def test_answer_that_is_not_the_models_is_refused(only, message):
    with FaultyServer(rate=1.0, only=only) as server, pytest.raises(RuntimeError, match=message):
        VllmEngine(endpoints(server), NAME, CHAT).complete([ask()])


def test_answer_under_another_name_of_the_same_model_is_accepted(server):
    cards = [{"id": name, "root": "/models/teacher", "parent": None} for name in ("teacher", "alias")]
    answers = iter([{"data": cards}])
    real, source = Endpoints.request, endpoints(server)
    source.request = lambda url, method, path, body=None, model=None: (  # type: ignore[method-assign]
        next(answers) if path == "/v1/models" else real(source, url, method, path, body, model)
    )
    server.change = lambda answer: {**answer, "model": "alias"}
    assert VllmEngine(source, "teacher", CHAT).complete([ask()])[0].finish_reason == "stop"


@pytest.mark.parametrize(("text", "decoded"), [("café", "caf\ufffd"), ("a b", "ab c")])
def test_text_of_other_letters_is_another_text(text, decoded):
    assert not same_text(text, decoded)


@given(st.text(), st.integers(0, 3))
def test_text_without_white_space_and_cut_characters_is_the_same(text, cut):
    assert same_text(text.strip(), text + "\ufffd" * cut)


def test_server_with_another_vocabulary_or_model_is_refused(server):
    server.vocabulary = SimpleNamespace(encode=lambda text: [7, 8, 9])
    with pytest.raises(EngineUnavailable, match="tokenizer 'tiny'"):
        vllm(server)
    server.model = "another"
    with pytest.raises(EngineUnavailable, match="'another'.*'teacher'.*engine.model"):
        vllm(server)


def test_reload_weights_loads_them_and_clears_the_prefix_cache_or_raises(server):
    server.answer = lambda path, body: {"success": path == "/reset_prefix_cache"}
    reload_weights(endpoints(server), Path("/weights"))
    loaded = {"method": "reload_weights", "kwargs": {"weights_path": "/weights"}}
    assert server.seen == [("/collective_rpc", loaded), ("/reset_prefix_cache", {})]
    server.answer = lambda path, body: {"success": False}
    with pytest.raises(EngineUnavailable, match=server.url):
        reload_weights(endpoints(server), Path("/weights"))
    for fault in (status(404), status(500, "no such file")):
        server.always = fault
        with pytest.raises(EngineUnavailable, match="/weights.*VLLM_SERVER_DEV_MODE=1"):
            reload_weights(endpoints(server), Path("/weights"))


def test_prompt_logprobs_are_those_of_its_ids_or_raise(server):
    entries = [None, {"7": {"logprob": -1.5}}, {"8": {"logprob": -0.5}, "9": {"logprob": -0.1}}]
    server.answer = lambda path, body: {"choices": [{"prompt_logprobs": entries}]}
    assert vllm(server).prompt_logprobs([6, 7, 8]) == [-1.5, -0.5]
    for ids in ([6, 7, 10], [6, 7], [6, 7, 8, 9]):
        with pytest.raises(EngineUnavailable, match="prompt_logprobs"):
            vllm(server).prompt_logprobs(ids)


def test_request_sets_every_sampling_parameter(server):
    vllm(server).complete([ask()])
    ((path, body),) = server.seen
    assert path == "/v1/completions" and body["prompt"] == CHAT.prompt_ids(MESSAGES)
    assert {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}.items() <= body.items()
    assert body["stop_token_ids"] == [CHAT.end_id] and body["return_token_ids"] and body["logprobs"] == 0
    assert "structured_outputs" not in body


def test_seed_depends_only_on_the_request(server):
    engine = vllm(server)
    engine.complete([ask(0), ask(1), ask(0)])
    seeds = Counter(body["seed"] for _, body in server.seen)
    assert sorted(seeds.values()) == [1, 2] and all(0 <= seed < 2**63 for seed in seeds)


def test_chat_request_sends_tools_and_template_arguments_and_keeps_parsed_fields(server):
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    server.message = lambda body, text: {"content": None, "reasoning": "so", "tool_calls": [call]}
    engine = VllmEngine(endpoints(server), "teacher", CHAT, request="chat", template_kwargs={"enable_thinking": False})
    (turn,) = engine.complete([ask(tools=tools)])
    ((path, body),) = server.seen
    assert path == "/v1/chat/completions" and body["tools"] == tools and body["tool_choice"] == "auto"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert turn.message == {"role": "assistant", "content": "", "reasoning": "so", "tool_calls": [call]}
    assert turn.output_ids and turn.logprobs == [-0.5] * len(turn.output_ids) and "COMPLETE_TASK" in turn.text


# --- an endpoint without ids -----------------------------------------------------------------------------------------


def hosted(server: Loopback, **options) -> OpenAIEngine:
    return OpenAIEngine("teacher", url=f"{server.url}/v1", **{"timeout": 5.0, **options})


def test_hosted_teacher_returns_text_calls_and_reasoning_as_separate_fields(server):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    server.message = lambda body, text: {"content": "Look.", "reasoning_content": "hm", "tool_calls": [call]}
    server.faults = [status(429, **{"retry-after": "0.1"}), status(500), drop, None]
    (turn,) = hosted(server).complete([ask()])
    assert turn.prompt_ids is turn.output_ids is turn.logprobs is None and turn.text == "Look."
    assert turn.message == {"role": "assistant", "content": "Look.", "reasoning": "hm", "tool_calls": [call]}
    assert len(server.seen) == 4


def test_hosted_teacher_over_quota_is_unavailable_and_a_refused_request_is_an_error(server):
    server.always = status(429, "quota")
    with pytest.raises(EngineUnavailable, match="quota.*2 tries"):
        hosted(server, attempts=2).complete([ask()])
    assert len(server.seen) == 2
    server.faults = [status(400, "too long")]
    server.always = None
    with pytest.raises(RuntimeError, match="too long"):
        hosted(server).complete([ask()])


CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def message_of(server: Loopback, **message) -> dict:
    """Return the message that the engine returns for a server's."""
    server.message = lambda body, text: message
    (turn,) = hosted(server).complete([ask()])
    assert turn.message and turn.text == turn.message["content"]
    return dict(turn.message)


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    ],
)
def test_content_in_parts_becomes_text_and_reasoning(server, thought):
    parts = [thought, {"type": "text", "text": "Look"}, {"type": "text", "text": "."}]
    assert message_of(server, content=parts) == {"role": "assistant", "content": "Look.", "reasoning": "hm"}


def test_refusal_is_the_models_text(server):
    assert message_of(server, content=None, refusal="I cannot.")["content"] == "I cannot."


def test_call_without_id_or_with_an_object_as_arguments_is_made_whole(server):
    extra = {"google": {"thought_signature": "abc"}}
    sent = {"id": "", "function": {"name": "bash", "arguments": {"command": "ls"}}, "extra_content": extra}
    first, second = message_of(server, content=None, tool_calls=[sent, {**sent, "id": None}])["tool_calls"]
    assert first == {**CALL, "id": first["id"], "extra_content": extra}
    assert first["id"] and second["id"] and first["id"] != second["id"]
    old = {"name": "bash", "arguments": '{"command": "ls"}'}
    (call,) = message_of(server, content=None, function_call=old)["tool_calls"]
    assert call == {**CALL, "id": call["id"]}
    (empty,) = message_of(server, tool_calls=[{**CALL, "function": {"name": "bash", "arguments": None}}])["tool_calls"]
    assert empty["function"]["arguments"] == "{}"


@pytest.mark.parametrize(("reason", "ours"), [("eos", "stop"), ("end_turn", "stop"), ("model_length", "length")])
def test_finish_reasons_of_other_providers_are_read(server, reason, ours):
    server.change = lambda answer: {**answer, "choices": [{**answer["choices"][0], "finish_reason": reason}]}
    assert hosted(server).complete([ask()])[0].finish_reason == ours


def in_answer(error) -> dict:
    return {"error": error}


def in_choice(error) -> dict:
    return {"choices": [{"message": {"content": "cut"}, "finish_reason": "error", "error": error}]}


@pytest.mark.parametrize("form", [in_answer, in_choice])
@pytest.mark.parametrize("code", [502, "429"])
def test_error_with_status_200_is_retried_as_its_code_says(server, form, code):
    answers = [form({"code": code, "message": "Provider returned error"})]
    server.change = lambda answer: answers.pop() if answers else answer
    engine = OpenAIEngine("teacher", url=f"{server.url}/v1", timeout=5.0)
    assert engine.complete([ask()])[0].text == SUBMITS and len(server.seen) == 2


@pytest.mark.parametrize("form", [in_answer, in_choice])
def test_refusal_with_status_200_is_not_retried_and_gives_the_providers_own_reason(server, form):
    error = {"code": 400, "message": "Provider returned error", "metadata": {"raw": "the prompt has 9 tokens"}}
    errors = [form(error)]
    server.change = lambda answer: errors.pop() if errors else answer
    with pytest.raises(RuntimeError, match="the prompt has 9 tokens") as caught:
        hosted(server).complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable)
    assert [body["messages"] for _, body in server.seen].count(MESSAGES) == 1
    server.change = lambda answer: form(error)  # of every request
    with pytest.raises(EngineUnavailable, match="the prompt has 9 tokens"):
        hosted(server).complete([ask()])


def test_error_without_status_contains_no_key(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-planted-4711")
    server.answer = lambda path, body: {"detail": "the key sk-planted-4711 is blocked"}
    with pytest.raises(RuntimeError) as caught:
        hosted(server, key_env="TEACHER_KEY", attempts=1).complete([ask()])
    assert "$TEACHER_KEY" in str(caught.value) and "sk-planted" not in str(caught.value)
    server.always = status(400, f"{'x' * 990} sk-planted-4711")  # a message is cut after the key is replaced
    with pytest.raises(RuntimeError) as caught:
        hosted(server, key_env="TEACHER_KEY").complete([ask()])
    assert "sk-pl" not in str(caught.value)


@pytest.mark.parametrize("code", [400, 500])
def test_request_that_a_hosted_teacher_alone_fails_on_stops_no_other(server, code):
    answer = server.answer

    def fails(path, body):
        if body["messages"] == MESSAGES:
            raise Refusal(code, "template error")
        return answer(path, body)

    server.answer = fails
    with pytest.raises(RuntimeError, match="template error") as caught:
        hosted(server, attempts=2).complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable)


@pytest.mark.parametrize("code", [400, 422, 500, 503])
def test_hosted_teacher_that_fails_on_every_request_stops_the_collection(server, code):
    server.always = status(code, "the model does not exist")
    with pytest.raises(EngineUnavailable, match="the model does not exist"):
        hosted(server, attempts=2).complete([ask()])


@pytest.mark.parametrize("code", [402, 405])
def test_status_that_every_request_would_get_stops_the_collection(server, code):
    server.always = status(code)
    with pytest.raises(EngineUnavailable, match="balance"):
        hosted(server).complete([ask()])


@pytest.mark.parametrize("token", [-5, 10**30])
def test_prompt_of_ids_beyond_the_vocabulary_is_refused(server, token):
    engine, answer = vllm(server, request="chat"), server.answer
    server.answer = lambda path, body: answer(path, body) | {"prompt_token_ids": [1, token]}
    with pytest.raises(RuntimeError, match=f"{token} .* 1024$|{token}, .* 1024$"):
        engine.complete([ask()])


def test_redirect_names_the_address(server):
    server.always = lambda handler: handler.reply(308, None, location="https://host/v2/chat/completions")
    with pytest.raises(EngineUnavailable, match="https://host/v2;"):
        hosted(server).complete([ask()])
    server.always = lambda handler: handler.reply(302, None, location="data:,x")
    with pytest.raises(RuntimeError, match="no address"):
        hosted(server, attempts=1).complete([ask()])
    server.always = status(304)
    with pytest.raises(RuntimeError, match="304"):
        hosted(server).complete([ask()])


def test_request_that_is_over_a_quota_by_itself_is_given_up(server, monkeypatch):
    monkeypatch.setattr(module, "MOST_TRIES", 5)
    engine, answer = vllm(server, attempts=4, backoff=0.01), server.answer

    def limited(path, body):
        if path.endswith("/completions"):
            engine._endpoints._answers += 1  # others are answered
            raise Refusal(429, "requested 40000 tokens")
        return answer(path, body)

    server.answer = limited
    with pytest.raises(RuntimeError, match="429 .*5 tries, ") as caught:
        engine.complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable)


def test_request_over_a_quota_waits_while_others_are_answered(server):
    lock, answered = threading.Lock(), list[float]()

    def limited(handler):
        with lock:
            now = time.monotonic()
            over = sum(now - at < 0.2 for at in answered) >= 2
            answered.extend([] if over else [now])
        if over:
            return status(429, "2 requests in 0.2 s")(handler)
        handler.reply(200, server.change(server.answer(handler.path, handler.body)))

    server.always = limited
    engine = vllm(server, attempts=4, backoff=0.05)
    assert len(engine.complete([ask(number) for number in range(24)])) == 24


# --- fields that an endpoint refuses or requires ---------------------------------------------------------------------


def refuses(server: Loopback, message: str, when) -> None:
    """Answer with status 400 and `message` to requests whose body satisfies `when`."""
    answer = server.answer

    def checked(path, body):
        if when(body):
            raise Refusal(400, message)
        return answer(path, body)

    server.answer = checked


@pytest.mark.parametrize(
    ("message", "when", "kept"),
    [
        ("'max_tokens' is not supported. Use 'max_completion_tokens' instead.", "max_tokens", "max_completion_tokens"),
        ("`temperature` and `top_p` cannot both be specified for this model.", "top_p", "temperature"),
        ("{'loc': ['body', 'seed'], 'msg': 'Extra inputs are not permitted'}", "seed", "top_p"),
    ],
)
def test_field_that_the_endpoint_refuses_is_left_out_from_then_on(server, caplog, message, when, kept):
    refuses(server, message, lambda body: when in body)
    engine = hosted(server)
    engine.complete([ask()])
    engine.complete([ask(1)])
    bodies = [body for _, body in server.seen if body["messages"] == MESSAGES]  # and two small ones of the first
    assert [when in body for body in bodies] == [True, False, False] and len(server.seen) == 5
    assert all(kept in body for body in bodies[1:]) and len(caplog.records) == 1


def test_changes_that_an_endpoint_needs_are_learned_from_small_requests(server, caplog):
    quoted = "cannot read 'I set the seed and the top_p.'"  # of one request, which quotes the model
    refuses(server, quoted, lambda body: body["messages"] == MESSAGES)
    with pytest.raises(RuntimeError, match="I set the seed") as caught:
        hosted(server).complete([ask()])
    assert not isinstance(caught.value, EngineUnavailable) and not caplog.records
    allowed = "extra field: seed; allowed: model, messages, temperature, top_p, max_tokens"
    refuses(server, allowed, lambda body: "seed" in body)
    request = replace(ask(), messages=[{"role": "user", "content": "again"}], tools=[{"type": "function"}])
    hosted(server).complete([request])
    assert {"temperature", "top_p", "max_tokens", "tools"} < server.seen[-1][1].keys()
    refuses(server, "the model takes no tools", lambda body: "tools" in body)
    with pytest.raises(EngineUnavailable, match="takes no tools"):
        hosted(server).complete([request])


def test_quota_at_the_small_request_is_waited_for(server):
    refuses(server, "too long", lambda body: body["messages"] == MESSAGES)
    over, answer = [True], server.answer

    def limited(path, body):
        if body["messages"] != MESSAGES and over:
            over.pop()
            raise Refusal(429, "slow down")
        return answer(path, body)

    server.answer = limited
    with pytest.raises(RuntimeError, match="too long") as caught:
        OpenAIEngine("teacher", url=f"{server.url}/v1", timeout=5.0).complete([ask()])
    assert not over and not isinstance(caught.value, EngineUnavailable)


def test_what_one_request_learned_is_kept_by_those_under_way(server):
    engine = hosted(server)
    answer = server.answer

    def slow(path, body):
        if body["messages"] == MESSAGES:
            engine._changes = ("seed",)  # another request learns it meanwhile
        return answer(path, body)

    server.answer = slow
    engine.complete([ask()])
    assert engine._changes == ("seed",)


def test_sampling_that_the_endpoint_refuses_is_an_error(server):
    refuses(server, "'temperature' does not support 0.0 with this model", lambda body: body.get("temperature") == 0.0)
    with pytest.raises(EngineUnavailable, match=r"0.0 with this model.*agent\.temperature"):
        hosted(server).complete([ask()])
    assert all(body["temperature"] == 0.0 for _, body in server.seen)


def test_thoughts_are_sent_back_where_the_endpoint_requires_them(server):
    thought = {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL]}
    messages = [*MESSAGES, thought, {"role": "tool", "tool_call_id": "c1", "content": "README"}]
    request = replace(ask(), messages=messages)
    hosted(server).complete([request])
    assert not any("hm" in str(body) for _, body in server.seen)
    refuses(
        server,
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1",
        lambda body: any(m["role"] == "assistant" and "reasoning_content" not in m for m in body["messages"]),
    )
    hosted(server).complete([request])
    assert [m.get("reasoning_content") for m in server.seen[-1][1]["messages"]] == [None, "hm", None]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_key_comes_from_the_environment_and_appears_in_no_message(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-planted-4711")
    server.always = echo_key
    engine = VllmEngine(endpoints(server, key_env="TEACHER_KEY"), "teacher", CHAT)
    for refused in (engine, hosted(server, key_env="TEACHER_KEY")):
        with pytest.raises(EngineUnavailable) as caught:
            refused.complete([ask()])
        assert "sk-planted" not in str(caught.value) and "$TEACHER_KEY" in str(caught.value)
        assert "sk-planted" not in repr(refused.fingerprint())


def test_error_names_the_variable_of_a_missing_key(server, monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(EngineUnavailable, match="TEACHER_KEY"):
        endpoints(server, key_env="TEACHER_KEY")
    with pytest.raises(EngineUnavailable, match="api_key_env"):
        Endpoints(["http://user:secret@127.0.0.1:1"])
