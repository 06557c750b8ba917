"""Conversation -> token ids and masks, through the tokenizer's chat template.

A turn's targets are exactly what an engine would have to sample there: they follow the ids of the
rendered prompt of that turn, and end with the first stop token (what a template writes after it,
often a newline, is not sampled). Where a template rewrites earlier turns, for example removes their
reasoning, a new sequence begins: each turn is trained once, in the context it is sampled in.

What a template has no place for is written as text: tools, tool calls and tool results in the
convention that vLLM's `hermes` parser reads, reasoning between <think> tags.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from common.formats import Drop, Messages, TrainOn, num_common

Tools = list[dict[str, Any]]

TEMPLATE_REASONS = (
    "template_error",
    "template_prefix",
    "no_stop_token",
    "stop_token_inside_turn",
    "template_loses_text",
)
"""drops that are the template's doing"""

# whatever Python code inside a template can raise
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# tokens that belong inside a turn's text, though some tokenizers call them special
_CONTENT_TOKENS = {
    f"<{slash}{name}>"
    for name in ("think", "tools", "tool_call", "tool_response")
    for slash in ("", "/")
}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_SHORT = 32
"""texts of fewer characters may well occur in a rendered conversation by chance"""
_PROBE_USER = {"role": "user", "content": "zqUser"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "zqTool",
        "description": "zq",
        "parameters": {
            "type": "object",
            "properties": {"zqKey": {"type": "string", "description": "zq"}},
            "required": ["zqKey"],
        },
    },
}
_TOOLS_TEXT = """# Tools

These functions can be called:
<tools>
{tools}
</tools>

A call is a JSON object with the function's name and its arguments, inside tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def stop_token_ids(
    tokenizer: Any,
    generation_config: Any | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """All ids that end a turn, sorted: EOS of tokenizer and generation config, template's own."""
    ids = {tokenizer.eos_token_id, template_terminator(tokenizer, template_kwargs)}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def template_terminator(
    tokenizer: Any, template_kwargs: dict[str, Any] | None = None
) -> int | None:
    """First special token that the chat template writes after the text of an assistant turn."""
    if not tokenizer.chat_template:
        return None
    content = "Paris"
    chat = [{"role": "user", "content": "France?"}, {"role": "assistant", "content": content}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, **template_kwargs or {})
    except _TEMPLATE_ERRORS:
        return None
    ids = tokenizer(text.rpartition(content)[2], add_special_tokens=False)["input_ids"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return next((i for i in ids if i in special), None)


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Finds control tokens that a text spells; tags of thoughts and tools may well be text."""
    tokens = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    tokens = (tokens | set(tokenizer.all_special_tokens)) - _CONTENT_TOKENS
    return re.compile("|".join(re.escape(t) for t in sorted(tokens)) or r"(?!)")


class ChatTemplate:
    """What one tokenizer's chat template makes of conversations."""

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        templates = tokenizer.chat_template
        if isinstance(templates, dict) and "default" not in templates:
            raise ValueError(
                f"the tokenizer has chat templates named {', '.join(sorted(templates))}, but no "
                "default one; choose with --chat_template FILE"
            )
        for name in self.template_kwargs:
            if name not in str(tokenizer.chat_template):
                raise ValueError(f"--chat_template_args: the chat template does not use {name!r}")
        self.notes: set[str] = set()
        """what was written as text because the template has no place for it"""
        self.stop_ids = {
            *stop_token_ids(tokenizer, template_kwargs=self.template_kwargs),
            *stop_ids,
        }
        self._encoder = _Encoder(tokenizer)
        self._special = special_tokens(tokenizer)
        self._tails: set[tuple[int, ...]] = set()
        """what the template is known to write after a turn's stop token"""
        self._losses: dict[tuple[Any, ...], set[int]] = {}
        """shape of a conversation -> messages that the template does not write"""

    def render(
        self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Text of a conversation.

        Raises:
            Drop: `template_error`, with the template's words.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            said = str(error) if isinstance(error, TemplateError) else repr(error)
            raise Drop("template_error", f"the chat template says: {said}") from error

    def check(self) -> None:
        """Refuse a template that cannot be trained on.

        Raises:
            ValueError: it does not end assistant turns, or rewrites the prompt of the turn it adds.
        """
        if template_terminator(self.tokenizer, self.template_kwargs) is None:
            try:
                self.render([_PROBE_USER, {"role": "assistant", "content": "Paris"}])
            except Drop as drop:
                raise ValueError(
                    f"the chat template cannot be trained on ({drop.reason}: {drop.detail}); bring "
                    "another one with --chat_template FILE"
                ) from drop
            raise ValueError(
                "the chat template ends assistant turns without a special token: the model could "
                "not learn to stop; bring another one with --chat_template FILE"
            )
        refusals: list[str] = []
        for answer in ("Paris", "<think>\nso\n</think>\n\nParis"):
            chat = [
                {"role": "user", "content": "France?"},
                {"role": "assistant", "content": answer},
            ]
            for messages in (chat * 2, chat):
                try:
                    self.sequences(messages, [])
                    return
                except Drop as drop:
                    refusals.append(f"{drop.reason}: {drop.detail}")
        raise ValueError(
            f"the chat template cannot be trained on ({refusals[0]}); bring another one with "
            "--chat_template FILE"
        )

    def prompt_ids(self, messages: Messages, tools: Tools) -> list[int]:
        """Ids that the model continues with an assistant turn."""
        messages, tools = self.adapt(messages, tools)
        return self._encoder.ids(self.render(messages, tools, add_generation_prompt=True))

    def whole_ids(self, messages: Messages, tools: Tools, *, num_context: int = 0) -> list[int]:
        """Ids of a conversation as the template writes it, for a model that is to judge it.

        Raises:
            Drop: as `sequences` does with `full`; marks of untrained turns do not matter.
        """
        messages = [{k: v for k, v in m.items() if k != "trained"} for m in messages]
        ((ids, _),) = self.sequences(messages, tools, num_context=num_context, train_on="full")
        return ids

    def sequences(
        self,
        messages: Messages,
        tools: Tools,
        *,
        num_context: int = 0,
        train_on: TrainOn = "all_turns",
    ) -> list[tuple[list[int], list[bool]]]:
        """Ids and loss mask of each sequence that the conversation needs, mostly one.

        Args:
            messages, tools: as `common.formats` makes them.
            num_context: assistant turns among the first `num_context` messages are not trained.
            train_on: all assistant turns, the last one, or every token but the first; turns that
                are marked `trained`: False are context.
        Raises:
            Drop: nothing to train, the template refuses the row, loses or rewrites what it says,
                the text spells special tokens, or `full` meets a turn that is not to be trained.
        """
        self._refuse_special_tokens(messages, tools)
        trainable = [m.get("trained", True) for m in messages if m["role"] == "assistant"]
        if train_on == "full" and not all(trainable):
            raise Drop("untrained_turn_in_full", "a turn is marked as not to be trained")
        num_context = sum(m["role"] == "assistant" for m in messages[:num_context])
        messages, tools = self.adapt(messages, tools)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        turns = [i for i, is_trained in zip(turns, trainable, strict=True) if is_trained][
            sum(trainable[:num_context]) :
        ]
        if not turns and train_on != "full":
            raise Drop("no_target", "no assistant turn to train")
        trained = turns[-1:] if train_on == "last_turn" else turns
        for i, message in enumerate(messages):
            if message["role"] == "user" or i in trained:
                _refuse_empty(message, i)
        whole = self._encoder.encode(self.render(messages, tools))
        if train_on == "full":
            self._refuse_lost_context(messages, tools, whole.text)
            for i in turns:  # thoughts in the history are the template's to remove
                self._refuse_lost_turn(messages[i], whole.text, thoughts=i == len(messages) - 1)
            return [(whole.ids, [t > 0 for t in range(len(whole.ids))])]
        done: list[tuple[list[int], list[bool]]] = []
        ids: list[int] = []
        mask: list[bool] = []
        for i in trained:
            prompt_ids, target_ids = self._turn(messages, tools, i, whole)
            if prompt_ids[: len(ids)] != ids:  # the template has rewritten what came before
                done.append((ids, mask))
                ids, mask = [], []
            mask = mask + [False] * (len(prompt_ids) - len(ids)) + [True] * len(target_ids)
            ids = prompt_ids + target_ids
        self._refuse_lost_context(messages, tools, whole.text)
        if whole.ids[: len(ids)] == ids:  # with what is said after the last trained turn
            ids, mask = whole.ids, mask + [False] * (len(whole.ids) - len(mask))
        return [*done, (ids, mask)]

    def _turn(
        self, messages: Messages, tools: Tools, i: int, whole: _Encoded
    ) -> tuple[list[int], list[int]]:
        """Prompt ids of assistant turn i, and the ids to sample after them."""
        if i == 0:  # templates cannot render an empty prompt
            raise Drop("starts_with_assistant", "nothing comes before the assistant's turn")
        prompt = self.render(messages[:i], tools, add_generation_prompt=True)
        text = self.render(messages[: i + 1], tools)
        if not text.startswith(prompt):
            raise Drop("template_prefix", _prefix_detail(prompt, text))
        rest = text[len(prompt) :]
        self._refuse_lost_turn(messages[i], rest)
        if not whole.text.startswith(text):
            whole = self._encoder.encode(text)
        prompt_ids = self._encoder.prefix_ids(prompt, whole)
        ids = self._encoder.prefix_ids(text, whole)
        start = len(prompt_ids)
        if ids[:start] != prompt_ids:  # tokens merge across the boundary: not what is sampled
            ids = prompt_ids + self._encoder.continuation(rest)
        end = self._end(ids, start)
        if end == start:
            raise Drop("no_stop_token", f"the template writes {rest[-100:]!r} at a turn's end")
        self._refuse_inner_stop(messages[:i], tools, prompt, tuple(ids[end:]))
        return prompt_ids, ids[start:end]

    def _end(self, ids: list[int], start: int) -> int:
        """Position after the first stop token; `start` if there is none."""
        return next((t + 1 for t in range(start, len(ids)) if ids[t] in self.stop_ids), start)

    def _refuse_inner_stop(
        self, context: Messages, tools: Tools, prompt: str, tail: tuple[int, ...]
    ) -> None:
        """After its first stop token a turn must go on as any plain one does there."""
        if tail in self._tails:
            return
        text = self._squeezed(tail)
        plain = self._probe([*context, {"role": "assistant", "content": "Paris"}], tools)
        if plain.startswith(prompt):
            ids = self._encoder.continuation(plain[len(prompt) :])
            end = self._end(ids, 0)
            same = end > 0 and text == self._squeezed(ids[end:])
        else:  # the template wants something else in this place
            same = not self._special.sub("", text)
        if not same:
            raise Drop(
                "stop_token_inside_turn", f"after a stop token the turn goes on: {text!r:.100}"
            )
        self._tails.add(tail)

    def _squeezed(self, ids: Iterable[int]) -> str:
        return "".join(self.tokenizer.decode(list(ids)).split())

    def _refuse_special_tokens(self, messages: Messages, tools: Tools) -> None:
        """Such text would become a control token: end a turn early, and be masked silently."""
        texts = [str(m[key]) for m in messages for key in m if key != "tool_calls"]
        calls = [call for m in messages for call in m.get("tool_calls", [])]
        if calls or tools:
            texts.append(_json([calls, tools]))
        if found := self._special.search("\0".join(texts)):
            raise Drop("special_token_in_text", f"the text spells {found[0]!r}")

    def _refuse_lost_context(self, messages: Messages, tools: Tools, rendered: str) -> None:
        position = 0
        for message in messages:
            if message["role"] in ("user", "tool"):
                is_result = message["role"] == "tool"
                position = self._refuse_loss(
                    message["content"], rendered, position, escaped=is_result
                )
            elif message["role"] != "assistant":  # some templates write it with the last question
                self._refuse_loss(message["content"], rendered)
        for i in self._lost(messages, tools):
            if len(text := messages[i]["content"].strip()) < _SHORT:
                raise _loss(text)

    def _lost(self, messages: Messages, tools: Tools) -> set[int]:
        """Messages of the context that go missing in a conversation of this shape."""
        shape = (bool(tools), *((m["role"], bool(m["content"]), *m) for m in messages))
        if shape not in self._losses:
            marks = {
                i: f"zq{i}zq"
                for i, m in enumerate(messages)
                if m["role"] != "assistant" and m["content"].strip()
            }
            text = self._probe(
                [m | {"content": marks.get(i, m["content"])} for i, m in enumerate(messages)], tools
            )
            self._losses[shape] = {i for i, mark in marks.items() if text and mark not in text}
        return self._losses[shape]

    def _refuse_lost_turn(
        self, message: dict[str, Any], rendered: str, *, thoughts: bool = True
    ) -> None:
        """Answer, thoughts and calls of a trained turn must be there."""
        parts = re.split(r"</?think>", message["content"])
        position = 0
        for part in parts if thoughts else parts[-1:]:
            position = self._refuse_loss(part, rendered, position)
        for key in _REASONING_KEYS if thoughts else ():
            self._refuse_loss(message.get(key) or "", rendered)
        values: list[Any] = []
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            values += [call["function"]["name"], *_leaves(arguments)]
        # by what they look like: True and 1 are equal
        for spellings, count in Counter(_spellings(value) for value in values).items():
            if sum(rendered.count(spelling) for spelling in spellings) < count:
                raise _loss(min(spellings, key=lambda text: (len(text), text)))

    def _refuse_loss(
        self, text: str, rendered: str, position: int = 0, *, escaped: bool = False
    ) -> int:
        """Where the text ends, looked for from a position on, possibly written as JSON."""
        text = text.strip()
        found = [
            start + len(spelling)
            for spelling in (_spellings(text) if escaped else (text,))
            if (start := rendered.find(spelling, position)) >= 0
        ]
        if not found:
            raise _loss(text)
        return min(found)

    # ---- what the template has no place for --------------------------------------------------

    def adapt(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """The conversation in the form that this template renders without losing anything.

        Assistant turns stay as many and in their order.
        """
        adapted: Messages = []
        num_calls = 0
        call_ids: list[str] = []  # not answered yet
        for message in messages:
            message = {k: v for k, v in message.items() if k != "trained"}
            if "reasoning" in message:
                message = self._write_reasoning(message)
            if "tool_calls" in message:
                message, calls = self._write_calls(message, num_calls), message["tool_calls"]
                num_calls += len(calls)
                call_ids = [c["id"] for c in message.get("tool_calls", calls) if "id" in c]
            if message["role"] == "tool":
                message = _answering(message, call_ids)
            if message["role"] == "tool" and not self._renders_results:
                self.notes.add("tool results are written as <tool_response> in a user turn")
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if adapted and adapted[-1].get("results"):
                    adapted[-1]["content"] += "\n" + text
                    continue
                message = {"role": "user", "content": text, "results": True}
            adapted.append(message)
        for message in adapted:
            message.pop("results", None)
        if tools and not self._renders_tools:
            self.notes.add("tools are written into the system turn as <tools> (Hermes)")
            lines = "\n".join(_json(tool) for tool in tools)
            return self._with_system(adapted, _TOOLS_TEXT.format(tools=lines)), []
        return adapted, tools

    def _write_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        reasoning = message.pop("reasoning")
        if self._reasoning_key:
            return message | {self._reasoning_key: reasoning}
        self.notes.add("reasoning is written as <think> before the answer")
        return message | {"content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}

    def _write_calls(self, message: dict[str, Any], num_before: int) -> dict[str, Any]:
        message = dict(message)
        calls = message.pop("tool_calls")
        if self._call_style is not None:
            return message | {"tool_calls": _styled(calls, *self._call_style, num_before)}
        self.notes.add("tool calls are written as <tool_call> (vLLM: --tool-call-parser hermes)")
        texts = [message["content"]] if message["content"] else []
        texts += [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
        return message | {"content": "\n".join(texts)}

    def _with_system(self, messages: Messages, text: str) -> Messages:
        """Add to the system turn; a template's own default system prompt stays in front."""
        first = messages[0] if messages else _PROBE_USER
        if first["role"] in ("system", "developer"):
            return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        if self._accepts_system:
            parts = [part for part in (self._default_system, text) if part]
            return [{"role": "system", "content": "\n\n".join(parts)}, *messages]
        return [first | {"content": f"{text}\n\n{first['content']}"}, *messages[1:]]

    def _probe(self, messages: Messages, tools: Tools | None = None) -> str:
        try:
            return self.render(messages, tools)
        except Drop:
            return ""

    @cached_property
    def _renders_tools(self) -> bool:
        return "zqTool" in self._probe([_PROBE_USER], [_PROBE_TOOL])

    @cached_property
    def _call_style(self) -> tuple[bool, bool] | None:
        """How calls must look: arguments as JSON text? with ids? None: it renders no calls."""
        function = {"name": "zqTool", "arguments": {"zqKey": "zqValue"}}
        for style in ((False, False), (False, True), (True, False), (True, True)):
            calls = _styled([{"type": "function", "function": function}], *style)
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            text = self._probe([_PROBE_USER, turn], [_PROBE_TOOL])
            # Python's quotes: the template prints the object where it expects JSON text
            if "zqTool" in text.rpartition("zqUser")[2] and "zqValue" in text and "{'" not in text:
                return style
        return None

    @cached_property
    def _renders_results(self) -> bool:
        turn: dict[str, Any] = {"role": "assistant", "content": "zqCall"}
        function = {"name": "zqTool", "arguments": {"zqKey": "zqValue"}}
        if self._call_style is not None:
            calls = _styled([{"type": "function", "function": function}], *self._call_style)
            turn |= {"content": "", "tool_calls": calls}
        result = {"role": "tool", "content": "zqResult", "name": "zqTool"}
        call_ids = [call["id"] for call in turn.get("tool_calls", []) if "id" in call]
        result = _answering(result, call_ids)
        return "zqResult" in self._probe([_PROBE_USER, turn, result], [_PROBE_TOOL])

    @cached_property
    def _reasoning_key(self) -> str | None:
        for key in _REASONING_KEYS:
            turn = {"role": "assistant", "content": "zqAnswer", key: "zqThought"}
            if "zqThought" in self._probe([_PROBE_USER, turn]):
                return key
        return None

    @cached_property
    def _accepts_system(self) -> bool:
        return "zqSystem" in self._probe([{"role": "system", "content": "zqSystem"}, _PROBE_USER])

    @cached_property
    def _default_system(self) -> str:
        """The system prompt that the template adds to conversations without one; "" if none."""
        own = self._probe([{"role": "system", "content": "zqSystem"}, _PROBE_USER])
        bare = self._probe([_PROBE_USER])
        before, _, after = own.partition("zqSystem")
        if not (bare.startswith(before) and bare.endswith(after)):
            return ""
        text = bare[len(before) : len(bare) - len(after)]
        again = self._probe([{"role": "system", "content": text}, _PROBE_USER])
        return text if again == bare else ""


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # Mistral: nine characters


def _answering(message: dict[str, Any], call_ids: list[str]) -> dict[str, Any]:
    """The tool result with the id of its call, the first one that is open if it names none."""
    if "tool_call_id" not in message:
        return message | {"tool_call_id": call_ids.pop(0)} if call_ids else message
    if message["tool_call_id"] in call_ids:
        call_ids.remove(message["tool_call_id"])
    return message


def _leaves(value: Any) -> Iterator[Any]:
    """Strings, numbers and the like, at any depth."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif not isinstance(value, str) or value.strip():
        yield value


def _spellings(value: Any) -> frozenset[str]:
    """What a template may write for a value: itself, or as JSON, JSON in JSON text or Python."""
    if not isinstance(value, str):
        return frozenset((_json(value), str(value)))
    text = value.strip()
    if text.isascii() and not any(c in text for c in "\"'\\\n\t\r"):
        return frozenset((text,))
    once = {text, _json(text)[1:-1], json.dumps(text)[1:-1]}
    python = repr(text)[1:-1], _json(text)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return frozenset({*once, *python, *(_json(spelling)[1:-1] for spelling in once)})


def _loss(text: str) -> Drop:
    return Drop("template_loses_text", f"the template does not write {text!r:.100}")


def _styled(
    calls: list[dict[str, Any]], as_json: bool, with_ids: bool, num_before: int = 0
) -> list[dict[str, Any]]:
    styled: list[dict[str, Any]] = []
    for number, call in enumerate(calls, start=num_before + 1):
        function = call["function"]
        if as_json:
            function = function | {"arguments": _json(function["arguments"])}
        ids = {"id": _call_id(number)} if with_ids else {}
        styled.append(ids | call | {"function": function})
    return styled


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # dates of parquet files


def _refuse_empty(message: dict[str, Any], i: int) -> None:
    if not message["content"].strip() and not message.keys() & {"tool_calls", *_REASONING_KEYS}:
        raise Drop("empty_turn", f"the {message['role']} turn {i + 1} has no text")


def _prefix_detail(prompt: str, text: str) -> str:
    same = num_common(prompt, text)
    return (
        f"the turn's prompt ends {prompt[max(0, same - 40) :][-80:]!r}, "
        f"the template writes {text[max(0, same - 40) :][:80]!r} with the turn"
    )


# ---- text -> ids ---------------------------------------------------------------------------------


@dataclass
class _Encoded:
    """One encoded text and where its added tokens are."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]
    """characters, of each added token"""
    positions: list[int] | None
    """of each added token in `ids`; None: ids and text do not agree on them"""


class _Encoder:
    """Rendered text -> ids, without encoding anew what a longer text has in common.

    Tokenizers cut the text at added tokens (<|im_start|> and the like) before anything else, so the
    ids up to the last one are those of the longer text; only what follows it is encoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
        self._added_ids = set(self._added.values())
        # of two that start at the same place the longer one wins, as in the tokenizer
        contents = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._memo: dict[str, list[int]] = {}
        self._to_verify = 32 if tokenizer.is_fast else -1

    def ids(self, text: str) -> list[int]:
        """All ids of a text, added tokens included.

        Raises:
            Drop: `invalid_unicode`.
        """
        return encode(self.tokenizer, text)

    def encode(self, text: str) -> _Encoded:
        """Ids of a text, prepared for `prefix_ids`."""
        ids = self.ids(text)
        matches = list(self._pattern.finditer(text))
        positions = [t for t, i in enumerate(ids) if i in self._added_ids]
        agree = [ids[t] for t in positions] == [self._added[m[0]] for m in matches]
        starts, ends = [m.start() for m in matches], [m.end() for m in matches]
        return _Encoded(text, ids, starts, ends, positions if agree else None)

    def prefix_ids(self, text: str, whole: _Encoded) -> list[int]:
        """`ids(text)` of a text with which `whole` begins."""
        if len(text) == len(whole.text):
            return whole.ids
        count = bisect.bisect_right(whole.ends, len(text))
        if self._to_verify < 0 or whole.positions is None or count == 0:
            return self.ids(text)
        section = text[whole.starts[count - 1] :]
        ids = whole.ids[: whole.positions[count - 1]] + self._section(section)
        if self._to_verify:  # a tokenizer that is not cut like this shows it soon
            right = self.ids(text)
            self._to_verify = self._to_verify - 1 if ids == right else -1
            return right
        return ids

    def continuation(self, text: str) -> list[int]:
        """Ids of a text in the middle: an added token in front keeps a space from being added."""
        anchor = self.tokenizer.eos_token or ""
        ids = self._section(anchor + text)
        return ids[1:] if anchor and ids[:1] == [self._added.get(anchor)] else self.ids(text)

    def _section(self, text: str) -> list[int]:
        if len(text) > 64:
            return self.ids(text)
        if len(self._memo) > 10_000:
            self._memo.clear()
        if text not in self._memo:
            self._memo[text] = self.ids(text)
        return self._memo[text]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without the special tokens that a tokenizer adds around it.

    Raises:
        Drop: `invalid_unicode`, half a surrogate pair.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Drop("invalid_unicode", f"{text[error.start]!r} is half a character") from error
    # verbose: no warning about lengths beyond the model's; the caller drops those
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
