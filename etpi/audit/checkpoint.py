"""Audit a checkpoint with the checks of training and serving: its files, and the server that is to serve it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etpi_assets.evaluation import probes
from etpi_assets.training.sft_checks import JUDGES
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.chat.tokenizer_files import misread
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import VllmEngine
from etpi_resources.errors import require_torch
from etpi_resources.inside import files_in
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.outside import read_object
from etpi_resources.trainers.contracts import SavedFigures
from etpi_resources.trainers.policy_servers import NEARER, stored_dtype_name

_TEXTS = ("Write a function that reverses a list.", "Why does this fail? assert total([1, 2]) == 2", "ls")
_MOST_TOKENS = 24
"""Prompts of the serving proof, and the most tokens of an answer."""
_SETTINGS = ("generation_config.json", "config.json")


Server = tuple[str, str, str | None]
"""URL of a server that returns token ids as vLLM does, the checkpoint's name there, and the variable with its key."""


def audit_checkpoint(folder: Path, base: Path, server: Server | None = None) -> Iterator[CheckOutcome]:
    """Check a model, an adapter, or a model with its adapter in the folder `adapter`.

    Raises:
        OSError, ValueError, RuntimeError: the files hold no model, or the adapter does not fit the base.
        PackageMissing: PyTorch is not installed.
    """
    adapter = next((f for f in (folder, folder / "adapter") if (f / "adapter_config.json").is_file()), None)
    whole = folder if (folder / "config.json").is_file() else None
    if not (adapter or whole):
        raise ValueError(f"{folder} holds neither config.json nor adapter_config.json: name a folder with a checkpoint")
    require_torch("comparing weights")
    for checked in (folder, base):
        files_in(checked)  # the libraries open every file by its name
    if whole:  # an adapter is served with its base's files
        yield from _of_files(whole, base)
    saved, model, of_base = _compare(whole, adapter, base)
    for judge in JUDGES:
        yield judge(SimpleNamespace(saved=saved))  # pyright: ignore[reportArgumentType]
    if server:
        source = whole if whole and (whole / "tokenizer.json").is_file() else base
        yield from _of_server(*server, load_chat_format(str(source)), model, of_base)


def _of_files(whole: Path, base: Path) -> Iterator[CheckOutcome]:
    """Check the files beside the weights."""
    try:
        chat, of_base = load_chat_format(str(whole)), load_chat_format(str(base))
    except (OSError, ValueError) as error:
        yield CheckOutcome("vocabulary_and_template", False, f"{error}; save tokenizer and template with the model")
    else:
        other = chat.vocabulary_hash != of_base.vocabulary_hash
        wrong = "ids are not the base's" if other else "AutoTokenizer reads other ids" if misread(whole) else ""
        text = f"{wrong}: save the tokenizer that encoded the rows" if wrong else "saved, with the base's ids"
        yield CheckOutcome("vocabulary_and_template", not wrong, text)
        settings = [read_object(whole / name) for name in _SETTINGS if (whole / name).is_file()]
        ends = next((value for one in settings if (value := one.get("eos_token_id")) is not None), None)
        missing = chat.end_ids - {*(ends if isinstance(ends, list) else [ends])}
        text = f"generation stops at {ends}, and the template ends a turn with {sorted(chat.end_ids)}"
        remedy = ": add it to eos_token_id of generation_config.json, or answers run to the limit" if missing else ""
        yield CheckOutcome("ends_turn", not missing, text + remedy)
    stored, expected = map(stored_dtype_name, (whole, base))
    yield CheckOutcome("dtype_as_base", stored == expected, f"config.json names {stored}, that of the base {expected}")


def _compare(whole: Path | None, adapter: Path | None, base: Path) -> tuple[SavedFigures, Any, Any]:
    """Return the figures of the weights, the checkpoint in float32, and its base: None if it is below an adapter."""
    import torch

    from etpi_resources.trainers.workers import checkpointing as cp

    stored = cp.stored_dtype(base)
    common: dict[str, Any] = {"dtype": stored_dtype_name(base), "compared_in": "float32"}
    if adapter is None:
        assert whole is not None
        model = cp.load_model(whole, torch.float32)
        before = cp.load_model(base, torch.float32)
        same, trained, changed = cp.changes_from_base(model, before, stored)
        common |= {"unchanged": tuple(same if len(same) == trained else ())}  # a part may be frozen on purpose
        return SavedFigures(**common, changed_share=changed, differing=(), trained=trained), model, before
    attached, merged, differing = cp.attach_adapter(base, adapter), None, list[str]()
    saved = cp.load_model(whole, stored) if whole else None
    for dtype in dict.fromkeys((torch.float32, stored)):  # a merge is computed in either
        again = deepcopy(attached) if dtype == torch.float32 else cp.attach_adapter(base, adapter, dtype)
        merged = again.merge_and_unload()
        differing = cp.differing_tensors(merged, saved, stored) if saved else []
        if not differing:
            break
    assert merged is not None
    zero, count = cp.zero_adapters(adapter)
    common |= {"zero_adapters": tuple(zero), "adapters": count, "differing": tuple(differing)}
    return SavedFigures(**common, changed_share=cp.merged_share(attached, merged, stored)), attached, None


def _of_server(
    url: str, name: str, key_env: str | None, chat: ChatFormat, model: Any, base: Any
) -> Iterator[CheckOutcome]:
    """Have the server answer prompts, and compare the probabilities of its answers with the files'."""
    import torch

    from etpi_resources.trainers.workers import checkpointing as cp

    messages = [[{"role": "user", "content": text}] for text in _TEXTS]
    prompts = [probes.ProbePrompt(text[0]["content"], chat.prompt_ids(text), text) for text in messages]
    check = "served_name"
    try:
        endpoints = Endpoints([url], key_env=key_env, attempts=2)
        with closing(VllmEngine(endpoints, name, chat, release=endpoints.close)) as engine:
            yield CheckOutcome(check, True, f"{url} lists {name}")
            check = "ids_returned"
            turns = probes.first_turns(engine, prompts, _MOST_TOKENS)
    except RuntimeError as error:  # of the server
        yield CheckOutcome(check, False, f"{error}. So nothing can be proved of the served weights")
        return
    whole = all(turn.prompt_ids and turn.output_ids and turn.logprobs for turn in turns)
    yield CheckOutcome(
        check, whole, f"{len(turns)} answers come with {'' if whole else 'no '}ids and log-probabilities"
    )
    gaps = [0.0, 0.0]
    for turn in turns if whole else ():
        output = torch.tensor(turn.output_ids)[:, None]
        for of, scorer in enumerate((model, base)):
            with model.disable_adapter() if scorer is None else nullcontext():  # the base below an adapter
                ids = torch.tensor([[*(turn.prompt_ids or ()), *(turn.output_ids or ())]])
                scores = cp.logits_of(scorer or model, ids)
            expected = scores[0, -len(output) - 1 : -1].log_softmax(-1).gather(-1, output)[:, 0]
            gaps[of] += float((expected - torch.tensor(turn.logprobs)).abs().mean()) / len(turns)
    of_files, of_base = gaps
    apart = f"log-probabilities differ by {of_files:.2g} nats a token from the files', by {of_base:.2g} from the base's"
    if max(of_files, of_base) < probes.LEAST_GAP:
        apart += ": the checkpoint answers as its base does; it was trained too little to tell which one is served"
    elif NEARER * of_base < of_files:
        apart += ": the base answers. The adapter was not loaded, or sleeps: load it again, and request its name"
    elif NEARER * of_files > of_base:
        apart += ": other weights are served. Unload the name, and load these files under a new one"
    if whole:
        yield CheckOutcome("differs_from_base", NEARER * of_files <= of_base and of_base >= probes.LEAST_GAP, apart)
