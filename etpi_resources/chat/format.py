"""Conversations as token ids: `ChatFormat` is one tokenizer with one chat template.

Text cannot inject structure. The control tokens of a template (`<|im_start|>`, `<|im_end|>`, `<|endoftext|>`, ...) come
only from the template; the same characters inside a message are encoded as plain text. Inline tokens (`<think>`,
`<tool_call>`, ...), which models write in their text, are always encoded as their ids.

A text is cut at control tokens, and its pieces are encoded as the tokenizer encodes them within the whole text: without
the white space that some control tokens remove beside them (Phi), and with a prefix only where the whole text has one
(Llama 2, Mistral). The text of a turn is encoded after the end of the generation prompt.
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import TemplateError

from etpi_resources.chat.bounds import TemplateUnbounded
from etpi_resources.chat.markers import END, PAD, TURN, TurnMarkers, ends_of_next, is_chatml
from etpi_resources.chat.marks import CALL, CALL_END, THINK, THINK_END, contains
from etpi_resources.chat.prefixes import AppendOnlyProbe, tags
from etpi_resources.chat.roles import Roles
from etpi_resources.chat.sources import (
    folder_template,
    named_tokenizer,
    own_templates,
    render_template,
    template_source,
    tokenizer_folder,
)
from etpi_resources.chat.tokenizer_files import pad_id, read_tokenizer, vocab_size
from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm, message_calls
from etpi_resources.chat.tool_forms.template import TemplateForm, TemplateRefuses, UnknownToolForm
from etpi_resources.hashes import json_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Tail = Literal["none", "open", "closed"]

NO_TURN = -1
"""`turn_id` of a template that begins an assistant's turn with no token of its own (Mistral)."""
# Private-use code points. Those that no message contains replace control tokens in messages during rendering.
_STAND_INS = range(0xE000, 0xF8FF)
_TAGS = frozenset({THINK, THINK_END, CALL, CALL_END, "<tool_response>", "</tool_response>"})
_BRACKETED = re.compile(r"\W.*\w.*\W", re.DOTALL)
_WORTH_SHARING = 4_000
"""Number of characters from which encoding on all cores is faster."""
_MOST_KEPT = 500_000
"""Number of characters whose ids are kept: the labels of a conversation are pieces of its prompts too."""


class Label(NamedTuple):
    """The text of an assistant's turn, with {stand-in: control token} for control tokens that are plain text in it."""

    text: str
    stand_ins: Mapping[str, str] = {}

    def replaced(self, text: str) -> Label:
        """Return the label with another text."""
        return Label(text, self.stand_ins)

    def masked(self, text: str) -> str:
        """Return a text with stand-ins for its control tokens."""
        for stand_in, control in self.stand_ins.items():
            text = text.replace(control, stand_in)
        return text

    @property
    def plain(self) -> str:
        """The text without stand-ins."""
        return _unmasked(self.text, self.stand_ins)


class ChatFormat:
    """One tokenizer with one chat template; immutable, safe to share between threads.

    The tokens of ChatML are known; those of another template are determined by rendering small conversations.

    Attributes:
        name: its name in lineage and fingerprints.
        tokenizer: the `transformers` fast tokenizer. Do not encode with it, because it parses control tokens in text
            and keeps state; use the methods of this class.
        template: the Jinja source.
        chatml: whether the template is of the ChatML family.
        pad_id: fills rows; never trained.
        think_open_id, think_close_id, tool_open_id, tool_close_id: inline ids; None if the vocabulary has none, so that
            these markers are text (`marks`).
        control_ids: ids that only the template writes. special_ids: control ids and inline ids.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerFast, template: str) -> None:
        self.name = name
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.chat_template = template
        self.template = template
        self._added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(self._added)
        special = {t.content: number for number, t in self._added.items() if t.special and t.content not in _TAGS}
        self.chatml = is_chatml(template)
        if self.chatml and (missing := [token for token in (TURN, END) if token not in special]):
            raise ValueError(
                f"chat format {name!r}: the tokenizer has no control token {', '.join(missing)}; ChatML needs it"
            )
        self.pad_id = special[PAD] if self.chatml and PAD in special else pad_id(tokenizer)
        self._inline = {t.content: number for number, t in self._added.items() if t.content not in special}
        self.think_open_id, self.think_close_id = map(self.inline_id, (THINK, THINK_END))
        self.tool_open_id, self.tool_close_id = map(self.inline_id, (CALL, CALL_END))
        self._stripping = {t.content: (t.lstrip, t.rstrip) for t in self._added.values() if t.lstrip or t.rstrip}
        self._openings: dict[str, str] = {}
        self._encoded: dict[tuple[str, bool], list[int]] = {}
        self._kept = 0

    def __reduce__(self) -> tuple[type[ChatFormat], tuple[str, PreTrainedTokenizerFast, str]]:
        """Pickle as the constructor's arguments: a pickled tokenizer would parse control tokens in text."""
        return ChatFormat, (self.name, self.tokenizer, self.template)

    @cached_property
    def _control(self) -> dict[str, int]:
        """Return {control token: id}: those of the vocabulary, and the other tokens that delimit messages.

        DeepSeek's vocabulary has `<｜User｜>` as an ordinary token.
        """
        written = "".join(self._delimiters())
        return {
            token.content: number
            for number, token in self._added.items()
            if token.content not in _TAGS
            and (token.special or (_BRACKETED.fullmatch(token.content) and token.content in written))
        }

    def _delimiters(self) -> Iterator[str]:
        """Yield small conversations as the template writes them."""
        system, user, answer = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))
        for messages in ([user], [user, answer], [user, answer, user], [system, user]):
            for generation_prompt in (False, True):
                with suppress(TemplateRefuses):
                    yield self.written(messages, None, generation_prompt)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that only the template writes."""
        return frozenset(self._control.values())

    @cached_property
    def header_ids(self) -> list[int]:
        """The ids of `markers.header`."""
        return self.encode(self.markers.header, allow_special=True)

    @cached_property
    def _split(self) -> re.Pattern[str]:
        """Matches control tokens, the longest first."""
        by_length = sorted(self._control, key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, by_length)) or "(?!)") + ")")

    @cached_property
    def _core(self) -> Tokenizer:
        """The tokenizer, which encodes control tokens as plain text."""
        from tokenizers import Tokenizer

        # Another one on the same vocabulary: every call of the transformers tokenizer resets the flag below.
        whole = self.tokenizer.backend_tokenizer
        core = Tokenizer(whole.model)
        core.normalizer, core.pre_tokenizer, core.decoder = whole.normalizer, whole.pre_tokenizer, whole.decoder
        added = [token for _, token in sorted(whole.get_added_tokens_decoder().items())]
        for token in added:  # the control tokens are special, whatever the vocabulary says
            token.special = token.content in self._control
        core.add_tokens(added)
        core.encode_special_tokens = True
        with suppress(AttributeError):  # the GNU library keeps 100 MB that loading a large vocabulary freed
            ctypes.CDLL(None).malloc_trim(0)
        return core

    @cached_property
    def _inner(self) -> Tokenizer:
        """The same for text after a control token: without the prefix that is written before a whole text only."""
        from tokenizers import Tokenizer

        before = self._core.pre_tokenizer
        if before is None or b'"prepend_scheme":"first"' not in (state := before.__getstate__()):
            return self._core
        inner = Tokenizer.from_str(self._core.to_str())
        without = copy.deepcopy(before)
        without.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
        inner.pre_tokenizer = without
        inner.encode_special_tokens = True
        return inner

    def has_control(self, text: str) -> bool:
        """Return whether a control token is in a text."""
        return self._split.search(text) is not None

    def first_control(self, text: str) -> str:
        """Return the first control token in a text; empty if there is none."""
        match = self._split.search(text)
        return match[0] if match else ""

    def controls_in(self, text: str) -> set[str]:
        """Return the control tokens that are in a text."""
        return {control for control in self._control if control in text}

    def inline_id(self, marker: str) -> int | None:
        """Return the id of a marker that models write in their text; None if it is no token of the vocabulary."""
        return self._inline.get(marker)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return vocab_size(self._core)

    @cached_property
    def vocabulary_hash(self) -> str:
        """The hash of every id and its text."""
        return json_hash(self._core.get_vocab(with_added_tokens=True))

    @cached_property
    def markers(self) -> TurnMarkers:
        """The control tokens that delimit an assistant's turn.

        Raises:
            NoTurnEnd: the template ends a turn with no control token of the tokenizer.
        """
        return TurnMarkers.chatml() if self.chatml else TurnMarkers.probe(self._bare, self._split, self.name)

    @cached_property
    def turn_id(self) -> int:
        """Begins an assistant's turn, and in most templates every message; NO_TURN if the template has no such id."""
        return NO_TURN if self.markers.turn is None else self._control[self.markers.turn]

    @cached_property
    def end_id(self) -> int:
        """Ends an assistant's turn in words."""
        return self._control[self.markers.end]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a turn: `end_id`, and the one after a call where that is another (gpt-oss: `<|call|>`)."""
        if self.chatml:
            return frozenset({self.end_id})
        call = self.template_form.call_end
        last = [match for match in self._split.finditer(call) if match.end() == len(call)]
        return frozenset({self.end_id, *(self._control[match[0]] for match in last)})

    def ended(self, output: Sequence[int]) -> list[int]:
        """Return an output with its end: one without an end gets `end_id`."""
        return [*output] if len(output) and output[-1] in self.end_ids else [*output, self.end_id]

    def without_end(self, output: Sequence[int]) -> list[int]:
        """Return an output without its end, if it has one."""
        return [*output[:-1]] if len(output) and output[-1] in self.end_ids else [*output]

    def as_history(self, output: Sequence[int]) -> list[int]:
        """Return an output as later prompts contain it, with the end that the template writes before a message."""
        ids = self.ended(output)
        if ids[-1] == self.end_id:
            ids[-1] = self._control[self.markers.kept_end]
        return ids

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Return the ids of a conversation and its generation prompt; `messages` are {"role", "content", ...}."""
        text, stand_ins = self._render(messages, tools, template_kwargs)
        return self._structured(text, stand_ins)

    def prefix_prompts(
        self,
        messages: Sequence[Mapping[str, Any]],
        ends: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> tuple[list[list[int]], bool]:
        """Return `prompt_ids(messages[:end])` for each of `ends`, and whether the template is append-only for them.

        The part that a prompt shares with the previous one, up to its generation prompt, is encoded once. If the
        template is append-only (`renders_once`), the conversation is also rendered once; otherwise every prompt is
        rendered. The ids are the same in both cases.
        """
        masked, stand_ins = self._masked(messages, tools)
        through_last = masked[0][: ends[-1] + 1] if ends else []
        appended = self.renders_once(through_last, tools=masked[1], **template_kwargs)
        texts = self._cut_prompts(masked, ends, template_kwargs, appended)
        if texts is None:
            texts = (self._apply(masked[0][:end], masked[1], template_kwargs) for end in ends)
        texts = map(self._without_dropped_space, texts)
        before, cuts = "", [0]
        added: list[str] = []
        plan: list[tuple[int, str]] = []  # (number of cuts shared with the previous prompt, generation prompt)
        for text in texts:
            header = self._last_header(text)
            keep = len(cuts)
            while cuts[keep - 1] > header or not text.startswith(before[: cuts[keep - 1]]):
                keep -= 1
            added.append(text[cuts[keep - 1] : header])
            cuts[keep:] = [header]
            plan.append((keep, text[header:]))
            before = text
        tails = list(dict.fromkeys(tail for _, tail in plan))
        encoded = self._structured_all([*added, *tails], stand_ins)
        tail_ids = dict(zip(tails, encoded[len(added) :], strict=True))
        ids: list[int] = []
        lengths = [0]
        prompts = []
        for (keep, tail), new in zip(plan, encoded, strict=False):
            del ids[lengths[keep - 1] :]
            ids.extend(new)
            lengths[keep:] = [len(ids)]
            prompts.append(ids + tail_ids[tail])
        return prompts, appended

    def renders_once(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> bool:
        """Return whether one rendering contains the prompts of all assistant messages: the template is append-only."""
        if not messages:
            return True
        if self._append_probe is None:
            return False
        shown = None if not tools else [{"type": "function", "function": {"name": "x", "description": "x"}}]
        setting = json.dumps([bool(tools), template_kwargs], sort_keys=True, default=str)
        return self._append_probe.appends(messages, lambda small: self._apply(small, shown, template_kwargs), setting)

    def observation_ids(
        self, content: str, role: str = "user", *, tool: str = "tool", **template_kwargs: Any
    ) -> list[int]:
        """Return the ids after an output that has ended: the message as the template writes it, and the generation
        prompt.

        Args:
            tool: the tool whose result it is, where the template names it.

        Raises:
            ValueError: the template does not render an observation after a turn.
        """
        # Take the ids that the template itself writes after an earlier assistant message, so any template works.
        if role == "tool" and not self.chatml:
            return self._result_ids(content, tool, template_kwargs)
        anchor = "anchor of the observation"
        messages = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": anchor},
            {"role": role, "content": content},
        ]
        text, stand_ins = self._render(messages, None, template_kwargs)
        end = self.markers.kept_end
        between, ended, after = text.partition(anchor)[2].partition(end)
        if not ended or self._split.sub("", between).strip():
            raise ValueError(f"chat format {self.name!r}: its template does not end an assistant message with {end}")
        return self._following(end, [after], stand_ins)[0]

    def _result_ids(self, content: str, tool: str, kwargs: Mapping[str, Any]) -> list[int]:
        """Return `observation_ids` of a tool's result, which some templates accept only after a call."""
        (call,) = message_calls([Call(tool, {"x": "y"})], as_text=self.template_form.as_text)
        turn = [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": call["id"], "name": tool, "content": content}
        masked, stand_ins = self._masked([*turn, result], None)
        before = self._apply(turn, None, kwargs, generation_prompt=False).rstrip()
        whole = self._apply(masked[0], None, kwargs)
        if not whole.startswith(before):
            raise ValueError(f"chat format {self.name!r}: a result changes how its template writes the call before it")
        return self._following(self._from_last_control(before), [whole[len(before) :]], stand_ins)[0]

    @cached_property
    def template_form(self) -> TemplateForm:
        """Return the form in which the template writes tool calls, determined by rendering a probe call.

        Raises:
            UnknownToolForm: the calls are in a form that is not in `FORMS`.
        """
        return TemplateForm.probe(self._bare, self.name)

    @cached_property
    def words(self) -> TemplateForm:
        """Return the form in which the template writes turns without calls."""
        try:
            return self.template_form
        except UnknownToolForm:
            return TemplateForm.of_words(self._bare, self.name)

    @cached_property
    def roles(self) -> Roles:
        """The roles that the template takes."""
        return Roles.probe(self._bare, calls_as_text=self.words.as_text)

    def answer(self, text: str) -> str:
        """Return an answer in words without what the template writes before it, such as a channel's name."""
        return text if self.chatml else self.template_form.answer(text)

    @property
    def tool_form(self) -> ToolForm | None:
        """The form of the student's tool calls; None if the template writes no calls.

        etpi's own templates do not render calls; under them, the student writes Qwen's XML in its text.

        Raises:
            UnknownToolForm: as `template_form`.
        """
        if self.template in own_templates():
            return FORMS["qwen_xml"]
        return self.template_form.form

    @property
    def calls_in_content(self) -> bool:
        """Return whether calls are part of a message's text, because the template is one of etpi's own."""
        return self.template in own_templates()

    def turn_ids(
        self, content: str, calls: Sequence[Call], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Return the ids of an assistant turn as the template writes it; only the template writes control tokens.

        The header, an empty think block that the template adds, and the end of the turn are not part of it; an end that
        is part of the call is.

        Raises:
            UnknownToolForm: the template writes no calls, or writes them in a form that is not in `FORMS`.
        """
        plain = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        masked, stand_ins = self._masked([{"role": "assistant", "content": content, "calls": plain}], tools)
        turn = masked[0][0]
        masked_calls = [Call(call["name"], call["arguments"]) for call in turn["calls"]]
        text = self.template_form.turn(
            turn["content"],
            masked_calls,
            masked[1],
            lambda messages, shown, prompt: self._apply(messages, shown, template_kwargs, prompt),
        )
        return self._following(self._opening(template_kwargs), [text], stand_ins)[0]

    def label_texts(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[Label]:
        """Return what the template writes for each assistant message after its generation prompt.

        The end of the turn is not part of it; a think block that the template adds to a turn without thoughts is.

        Raises:
            UnknownToolForm: a message has calls, and the template writes none, or in a form that is not in `FORMS`.
        """

        heads: dict[str, str] = {}

        def apply(shown: list[Any], offered: list[Any] | None, prompt: bool) -> str:
            if not prompt:
                return self._apply(shown, offered, template_kwargs, prompt)
            if (key := repr((shown, offered))) not in heads:
                heads[key] = self._apply(shown, offered, template_kwargs, prompt)
            return heads[key]

        labels = []
        for message in messages:
            masked, stand_ins = self._masked([message], tools)
            form = self.template_form if message.get("tool_calls") else self.words
            labels.append(Label(form.label(masked[0][0], masked[1], apply), stand_ins))
        return labels

    def label_ids(self, labels: Sequence[Label], **template_kwargs: Any) -> list[list[int]]:
        """Return the ids of labels from `label_texts` with the end of the turn, as they follow the generation prompt.

        Only the template writes control tokens in them.
        """
        opening, ends = self._opening(template_kwargs), tuple(self.decode([i]) for i in self.end_ids)
        labels = [label if label.text.endswith(ends) else label.replaced(label.text + self._ending) for label in labels]
        plain = [label.text for label in labels if not label.stand_ins]
        together = iter(self._following(opening, plain, {}))
        return [
            self._following(opening, [label.text], label.stand_ins)[0] if label.stand_ins else next(together)
            for label in labels
        ]

    @cached_property
    def _ending(self) -> str:
        """The text that the template writes after an answer, through the end of the turn (Llama 2: a blank, `</s>`)."""
        before, end, _ = self.words.end.partition(self.markers.end)
        return before + end if end else self.markers.end

    def _opening(self, kwargs: Mapping[str, Any]) -> str:
        """Return the text of the generation prompt from its last control token on."""
        key = json.dumps(dict(kwargs), sort_keys=True, default=str)
        if key not in self._openings:
            prompt = self._apply([{"role": "user", "content": "x"}], None, kwargs)
            self._openings[key] = self._from_last_control(prompt)
        return self._openings[key]

    def _from_last_control(self, text: str) -> str:
        return text[max((match.start() for match in self._split.finditer(text)), default=0) :]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Return canonical ids. Inline tokens are one id; control tokens are plain text unless `allow_special`."""
        if allow_special:
            return self._structured(text, {})
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, on all cores if there is enough text."""
        return _encode_all(self._core, texts)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return text; invalid UTF-8 becomes U+FFFD. `skip_special` omits control tokens but not inline tokens."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special)

    def tail_form(self, prompt_ids: Sequence[int]) -> Tail:
        """Return whether the generation prompt opens a think block ("open"), also closes it ("closed"), or neither."""
        starts = self.control_ids if self.turn_id == NO_TURN else {self.turn_id}
        backwards = range(len(prompt_ids) - 1, 0, -1)  # the generation prompt is short
        last_turn = next((at for at in backwards if prompt_ids[at] in starts), 0)
        tail = prompt_ids[last_turn:]
        if not contains(tail, (THINK,), self):
            return "none"
        return "closed" if contains(tail, (THINK_END,), self) else "open"

    def save(self, folder: Path) -> None:
        """Write tokenizer and template as a Hugging Face folder."""
        self.tokenizer.save_pretrained(folder)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """Return the rendered text, in which only the template writes control tokens, and {stand-in: control token}."""
        masked, stand_ins = self._masked(messages, tools)
        return self._apply(masked[0], masked[1], kwargs), stand_ins

    def _masked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[list[Any], dict[str, str]]:
        """Return [messages, tools] with stand-ins for the control tokens in texts, and {stand-in: control token}."""
        masked: list[Any] = [list(map(dict, messages)), None if tools is None else list(tools)]
        stand_ins: dict[str, str] = {}
        texts = list(_texts(masked))
        if any(self._split.search(text) for text in texts):
            used = set().union(*texts)
            free = (chr(point) for point in _STAND_INS if chr(point) not in used)
            stand_ins = dict(zip(free, self._control, strict=False))
            if len(stand_ins) < len(self._control):
                raise TemplateRefuses("a conversation has too many of the characters U+E000 to U+F8FF; remove some")
            forward = {control: stand_in for stand_in, control in stand_ins.items()}
            masked = _mapped(masked, lambda text: self._split.sub(lambda match: forward[match[0]], text))
        return masked, stand_ins

    def _cut_prompts(
        self, masked: Sequence[Any], ends: Sequence[int], kwargs: Mapping[str, Any], appended: bool
    ) -> Iterator[str] | None:
        """Return the prompts' texts, cut from one rendering of the longest; None if it does not contain all of them.

        Args:
            appended: `renders_once` of the messages through the last of `ends`.
        """
        messages, tools = masked
        spoken = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if len(ends) < 2 or list(ends) != sorted(set(ends) & {*spoken, len(messages)}):
            return None
        if ends[-1] == len(messages):  # a prompt follows the last message
            appended = self.renders_once([*messages, {"role": "assistant", "content": ""}], tools=tools, **kwargs)
        if not appended:
            return None
        whole = self._apply(messages[: ends[-1]], tools, kwargs)
        heads = [match.start() for match in re.finditer(re.escape(self.markers.header), whole)]
        before = [bisect_left(spoken, end) for end in ends]
        if len(heads) != before[-1] + 1:
            return None
        tail = whole[heads[-1] :]
        # `renders_once` tests small conversations only, so compare one prompt of this conversation too.
        middle = len(ends) // 2
        if self._apply(messages[: ends[middle]], tools, kwargs) != whole[: heads[before[middle]]] + tail:
            return None
        return (whole[: heads[place]] + tail for place in before)

    @cached_property
    def _append_probe(self) -> AppendOnlyProbe | None:
        """None if the template marks no beginning of a turn: then every prompt is rendered by itself."""
        markers = self.markers
        return AppendOnlyProbe(tags(self.template), markers.header, markers.turn) if markers.turn else None

    def _last_header(self, text: str) -> int:
        """Return where the generation prompt begins, or the last control token if the template has no header.

        A control token starts there, so the texts before and after it are encoded separately anyway.
        """
        if self.markers.turn:
            return max(text.rfind(self.markers.turn), 0)
        return len(text) - len(self._from_last_control(text))

    def _apply(
        self, messages: list[Any], tools: list[Any] | None, kwargs: Mapping[str, Any], generation_prompt: bool = True
    ) -> str:
        return self._bare(self.roles.fit(messages), tools, generation_prompt, **kwargs)

    def _bare(self, messages: Sequence[Any], tools: list[Any] | None, generation_prompt: bool, **kwargs: Any) -> str:
        """Render the messages as they are, with the end of a last turn that the next message would write."""
        text = self.written(messages, tools, generation_prompt, **kwargs)
        if generation_prompt or messages[-1]["role"] != "assistant" or self._ends_of_next is None:
            return text
        return text + self._ends_of_next[bool(messages[-1].get("tool_calls"))]

    @cached_property
    def _ends_of_next(self) -> tuple[str, str] | None:
        return None if self.chatml or "eos_token" in self.template else ends_of_next(self.written, self._split)

    def written(self, messages: Sequence[Any], tools: list[Any] | None, generation_prompt: bool, **kwargs: Any) -> str:
        """Render the messages as they are.

        Raises:
            TemplateRefuses: the template raises an error.
        """
        try:
            return render_template(self.tokenizer, self.template, list(messages), tools, generation_prompt, **kwargs)
        except TemplateUnbounded:
            raise
        except TemplateError as error:
            raise TemplateRefuses(f"chat template {self.name!r} refuses a conversation: {error}") from error
        except Exception as error:  # of Python, in an expression of the template
            raise TemplateRefuses(
                f"chat template {self.name!r} fails for a conversation: {type(error).__name__}: {error}"
            ) from error

    def _structured(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Return the ids of a rendered text; control tokens become their ids, and stand-ins plain characters."""
        return self._structured_all([text], stand_ins)[0]

    def _structured_all(self, texts: Sequence[str], stand_ins: Mapping[str, str]) -> list[list[int]]:
        """Return `_structured` of each text; encode a repeated piece once."""
        control = self._control
        split = [[(piece, at == 0) for at, piece in enumerate(self._pieces(text))] for text in texts]
        plain = {piece: (_unmasked(piece[0], stand_ins), piece[1]) for text in split for piece in text}
        known = self._encode_pieces([text for piece, text in plain.items() if piece[0] not in control])
        ids = {piece: [control[piece[0]]] if piece[0] in control else known[text] for piece, text in plain.items()}
        return [[number for piece in text for number in ids[piece]] for text in split]

    def _encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], list[int]]:
        """Return the ids of each (text without structure, whether it begins a whole text); the last ones are kept."""
        kept = self._encoded  # replaced, never emptied: other threads read it
        ids = {piece: kept[piece] for piece in pieces if piece in kept}
        for core, starts in ((self._core, True), (self._inner, False)):
            fresh = list(dict.fromkeys(piece for piece in pieces if piece[1] == starts and piece not in ids))
            ids |= zip(fresh, _encode_all(core, [text for text, _ in fresh]), strict=True)
            self._kept += sum(len(text) for text, _ in fresh)
        if self._kept > _MOST_KEPT:
            self._encoded, self._kept = {}, sum(len(text) for text, _ in ids)
        self._encoded |= ids
        return ids

    def _following(self, before: str, texts: Sequence[str], stand_ins: Mapping[str, str]) -> list[list[int]]:
        """Return the ids of texts that follow another text, as the tokenizer reads both together.

        If an id spans the border, a model that has read `before` writes other ids: those after its control token.

        Args:
            before: begins with a control token, and has no other.
        """
        known = self._structured(before, {})
        whole = self._structured_all([before + text for text in texts], stand_ins)
        control = self._split.match(before)
        return [
            ids[len(known) :]
            if ids[: len(known)] == known
            else self._structured((control[0] if control else "") + text, stand_ins)[bool(control) :]
            for ids, text in zip(whole, texts, strict=True)
        ]

    def _pieces(self, text: str) -> list[str]:
        """Cut a text at control tokens, without the white space that these remove beside them."""
        pieces = self._split.split(text)
        for at in range(1, len(pieces), 2) if self._stripping else ():
            left, right = self._stripping.get(pieces[at], (False, False))
            pieces[at - 1] = pieces[at - 1].rstrip() if left else pieces[at - 1]
            pieces[at + 1] = pieces[at + 1].lstrip() if right else pieces[at + 1]
        return [piece for piece in pieces if piece]

    def _without_dropped_space(self, text: str) -> str:
        return "".join(self._pieces(text)) if self._stripping else text


@lru_cache
def load_chat_format(name: str, template: str | None = None) -> ChatFormat:
    """Load a chat format by name: "tiny", "qwen3", a folder with tokenizer.json, or a pinned name (`sources`).

    Args:
        template: "tiny", "terminal" (the terminal prompt contract), the stem of a template that TRL ships, a Jinja
            file, or a folder or pinned name with a template; None: the template that belongs to `name`.

    Raises:
        FileNotFoundError: `name` is neither a known name nor a folder with tokenizer.json, or the template is missing.
        TokenizerUnavailable: the hub's files are not cached and cannot be downloaded.
    """
    if name == "qwen3":
        return ChatFormat(name, named_tokenizer(name), template_source(template or "qwen3"))
    folder = tokenizer_folder(name)
    source = template_source(template) if template else folder_template(folder)
    special = {"eos_token": END, "pad_token": PAD} if is_chatml(source) else {}
    return ChatFormat(name, read_tokenizer(folder, **special), source)


def same_vocabulary(first: str, second: str) -> bool:
    """Return whether two tokenizers, by their names, have the same ids; False where one cannot be read here."""
    if first == second:
        return True
    with suppress(OSError, ValueError):
        return load_chat_format(first).vocabulary_hash == load_chat_format(second).vocabulary_hash
    return False


def _encode_all(core: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, encoded on all cores if there is enough text."""
    if sum(map(len, texts)) < _WORTH_SHARING:
        return [core.encode(text, add_special_tokens=False).ids for text in texts]
    return [encoding.ids for encoding in core.encode_batch_fast(list(texts), add_special_tokens=False)]


def _unmasked(text: str, stand_ins: Mapping[str, str]) -> str:
    """Return a text with its control tokens in place of {stand-in: control token}."""
    for stand_in, control in stand_ins.items():
        text = text.replace(stand_in, control)
    return text


def _texts(value: Any) -> Iterable[str]:
    """Yield every text in nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Any) -> Any:
    """Return the same nesting with `change` applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
