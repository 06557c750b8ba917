"""Dataset rows in any accepted format -> messages and tools in one form.

The format is detected per row from its columns. What is wrong with a column is a `ValueError`; what
is wrong inside a conversation drops the row, with a reason to count and a detail to show.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Messages = list[dict[str, Any]]
"""role (system, developer, user, assistant, tool) and content (text); assistant turns may have
`tool_calls` [{"type": "function", "function": {"name", "arguments"}}], `reasoning`, and
`trained` (False, or absent)"""
Row = dict[str, Any]
TrainOn = Literal["all_turns", "last_turn", "full"]

SFT_FORMATS = (
    "messages, conversations, conversations+chosen, prompt+completion, prompt+chosen, "
    "question+answer, question+chosen, instruction(+input)+output, instruction(+input)+chosen, "
    "text, chosen"
)
PREFERENCE_FORMATS = (
    "conversations+chosen+rejected, prompt+chosen+rejected, messages+chosen+rejected, "
    "question+chosen+rejected, instruction(+input)+chosen+rejected, "
    "chosen+rejected (conversations or texts that begin alike)"
)
RL_FORMATS = (
    "prompt (text or messages), question+answer, verl rows (prompt, reward_model.ground_truth), "
    "preference rows"
)
_SYSTEM = ("system", "developer")
_ROLES = {
    **dict.fromkeys(_SYSTEM, ""),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response"), "tool"),
    "function_call": "function_call",
}
_SIDES = ("chosen", "rejected")
_PROMPTS = {
    *("prompt", "prompts", "question", "questions", "query", "problem", "post", "user"),
    *("instruction", "instructions", "input", "inputs", "context", "system", "system_prompt"),
    *("messages", "conversation", "conversations", "dialog", "dialogue", "history"),
}
"""columns of the context that responses were given in, where a dataset has one"""
_EXPECTED = "a list of {role, content} messages"
_TRAINED = ("weight", "train", "trainable", "trained")
"""what datasets call a mark that is 0 or false on a turn that is not to be learned"""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GRADES = (
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""what datasets call the grades of both sides"""
_HH_ANSWER = "\n\nAssistant:"


class Drop(Exception):  # noqa: N818  a decision, not an error
    """The row cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        """name to count by"""
        self.detail = detail
        """what is wrong with this row"""


@dataclass
class Example:
    """One row: `completion` is to be trained, `prompt` is its context."""

    prompt: str | Messages
    """text goes with a text completion; [] if the conversation or text is all in `completion`"""
    completion: str | Messages
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class PairExample:
    """One preference row: a prompt and two responses, all text or all messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    margin: float | None = None
    """how much better the chosen side is; None: the row does not say"""
    grades: tuple[float, float] = (math.nan, math.nan)
    """of both sides; NaN: the row does not say"""
    whole_texts: bool = False
    """the row has whole texts, which no template may change; `prompt` is their common beginning"""


def detect_format(row: Row) -> str:
    """Name of an SFT row's format, preferences included: the columns it needs, joined by +.

    Raises:
        ValueError: unknown columns.
    """
    return _detect(row, _FORMATS, f"unknown format: columns {sorted(row)}; accepted: {SFT_FORMATS}")


def detect_pair_format(row: Row) -> str:
    """Name of a preference row's format, whatever other columns it has; raises as the above."""
    message = (
        f"no known format of preferences: columns {sorted(row)}; accepted: {PREFERENCE_FORMATS}"
    )
    return _detect(row, _PAIR_FORMATS, message)


def _detect(row: Row, formats: Mapping[str, Any], unknown: str) -> str:
    # columnar files fill the columns of other rows' formats with null
    for columns in ({name for name, value in row.items() if not is_null(value)}, set(row)):
        for name in formats:
            if columns.issuperset(name.split("+")):
                return name
    raise ValueError(unknown)


def parse_row(row: Row, name: str) -> Example:
    """Read a row of a detected format; of preferences the chosen side.

    Raises:
        Drop: something inside the conversation or the tools cannot be used.
        ValueError: a column of the wrong type.
    """
    prompt, completion = _with_system(row, *_FORMATS[name](row))
    return Example(prompt, completion, _tools(row))


def parse_pair(row: Row, name: str) -> PairExample:
    """Read a row of a detected preference format.

    Raises:
        Drop: something inside a conversation or the tools cannot be used; a side without a
            response (`empty_response`), or whose response does not end with the assistant
            (`ends_without_answer`); sides with different prompts (`prompts_differ`), or none
            (`empty_prompt`).
        ValueError: a column of the wrong type, or one with a prompt beside two whole texts.
    """
    sides: dict[str, Exchange] = dict(zip(_SIDES, _PAIR_FORMATS[name](row), strict=True))
    whole_texts = name == "chosen+rejected" and isinstance(sides["chosen"][1], str)
    if not whole_texts:
        sides = {column: _with_system(row, *side) for column, side in sides.items()}
    for column, (_, response) in sides.items():
        if is_empty(response):
            raise Drop("empty_response", f"the {column} side says nothing after the prompt")
    if any(isinstance(part, list) for side in sides.values() for part in side):
        for column, (prompt, response) in sides.items():
            prompt, response = _as_turns(prompt, "user"), _as_turns(response, "assistant")
            sides[column] = prompt, response
            if not prompt:
                raise Drop("empty_prompt", "nothing comes before the responses")
            if response[0]["role"] != "assistant":
                raise Drop("prompts_differ", f"after the prompt {column} has another question")
            if response[-1]["role"] != "assistant":
                raise Drop(
                    "ends_without_answer", f"{column}: {response[-1]['role']} turn at the end"
                )
    (prompt, chosen), (other_prompt, rejected) = sides.values()
    if prompt != other_prompt:
        raise Drop("prompts_differ", "chosen and rejected bring different prompts")
    if isinstance(prompt, str) and not prompt.strip():
        detail = "nothing comes before the responses"
        if whole_texts:
            detail = "no column `prompt`, and the texts have no beginning in common, up to a space"
        raise Drop("empty_prompt", detail)
    graded = ((_number(row, better), _number(row, worse)) for better, worse in _GRADES)
    margin = _number(row, "margin")
    return PairExample(
        *(prompt, chosen, rejected, _tools(row)),
        margin=None if math.isnan(margin) else margin,
        grades=next((g for g in graded if not all(map(math.isnan, g))), (math.nan, math.nan)),
        whole_texts=whole_texts,
    )


def _number(row: Row, column: str) -> float:
    """A column's number, which may be written as text; NaN if there is none."""
    value = row.get(column)
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return math.nan
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    # beyond 1e30 a float32 loss would overflow; not (<=) refuses a NaN that is written out
    if not isinstance(number, int | float) or isinstance(number, bool) or not abs(number) <= 1e30:
        raise ValueError(f"{column}: expected a number up to 1e30, found {value!r:.200}")
    return float(number)


def parse_prompt(row: Row) -> tuple[str, str | Messages, list[dict[str, Any]]]:
    """Column name, prompt (without null entries) and tools of an RL row; raises as `parse_row`.

    Of a preference row without a `prompt` column: its format, and the prompt of both sides.
    """
    if is_null(row.get("prompt")) and set(_SIDES) <= set(row):
        name = detect_pair_format(row)
        pair = parse_pair(row, name)
        if pair.whole_texts:
            raise Drop("no_prompt_column", "the prompt is only a part of the texts")
        return name, _unmarked(pair.prompt), pair.tools
    if "prompt" not in row and not {"question", "answer"} <= set(row):
        raise ValueError(f"unknown format: columns {sorted(row)}; accepted: {RL_FORMATS}")
    key = "prompt" if "prompt" in row else "question"
    prompt = "" if is_null(row[key]) else text_or_messages(row[key], key)
    if prompt and (system := _system(row)):
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        prompt = _prepend(system, prompt)
    return key, _unmarked(prompt), _tools(row)


def _unmarked(prompt: str | Messages) -> str | Messages:
    """A prompt without marks of what is to be trained."""
    if isinstance(prompt, str):
        return prompt
    return [{k: v for k, v in message.items() if k != "trained"} for message in prompt]


def is_null(value: Any) -> bool:
    """Whether a column is empty: null, or NaN or infinity, as pandas writes missing values."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def is_empty(response: str | Messages) -> bool:
    """Whether a response says nothing: no text, calls or reasoning in any turn."""
    if isinstance(response, str):
        return not response.strip()
    return not any(
        message["content"].strip() or message.keys() & {"tool_calls", "reasoning"}
        for message in response
    )


def num_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def as_text(value: Any, column: str) -> str:
    """Text of a column; null is empty, numbers are written out."""
    if is_null(value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{column}: expected text, found {value!r:.200}")


def text_or_messages(value: Any, column: str) -> str | Messages:
    """Text as it is, anything else as messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{column}: expected text or {_EXPECTED}, found {value!r:.200}")
    return as_messages(value, column)


def as_messages(value: Any, column: str) -> Messages:
    """Messages in one form; role/content and from/value are both read.

    A `function_call` entry becomes the tool calls of the assistant turn right before it, if there
    is one: that is one turn when the model writes it. Null entries, which columnar files add to
    all rows, are removed, and so are system turns without text.

    Raises:
        Drop: unknown role, content that is not text, broken tool calls, a weight besides 0 and 1.
        ValueError: not a list of objects.
    """
    if is_null(value):
        return []
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise ValueError(f"{column}: expected {_EXPECTED}, found {value!r:.200}")
    messages: Messages = []
    side = f"{column}: " if column in _SIDES else ""
    for number, raw in enumerate(value, start=1):
        message = _message(raw, f"{side}message {number}")
        if message.pop("is_call", False) and messages and messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", []) + message["tool_calls"]
            messages[-1] = message | messages[-1] | {"tool_calls": calls}
        elif message["role"] not in _SYSTEM or message["content"].strip():
            messages.append(message)
    return messages


def _message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    message = without_nulls(raw)
    name = message.pop("from", None) if "role" not in message else message["role"]
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Drop("unknown_role", f"{where}: " + (f"role {name!r:.100}" if name else "no role"))
    content = message.pop("value", "") if "content" not in message else message["content"]
    untrained = _untrained(message, where)
    if role == "function_call":
        calls = as_tool_calls(content, where)
        call = {"role": "assistant", "content": "", "tool_calls": calls, "is_call": True}
        return call | untrained
    if role == "assistant":
        message |= untrained
    message |= {"role": role or name.lower(), "content": _content(content, role, where)}
    calls = message.pop("tool_calls", None) or message.pop("function_call", None)
    if calls:
        message["tool_calls"] = as_tool_calls(calls, where)
    thoughts = [message.pop(key) for key in _REASONING if key in message]
    if thoughts and role == "assistant":
        if not isinstance(thoughts[0], str):
            raise Drop("not_text", f"{where}: reasoning must be text, found {thoughts[0]!r:.100}")
        message |= {"reasoning": thoughts[0]} if thoughts[0].strip() else {}
    return message


def _untrained(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Take the marks out of a message: {"trained": False} if one of them says so."""
    marks = {key: message.pop(key) for key in _TRAINED if key in message}
    marks = {key: mark for key, mark in marks.items() if not is_null(mark)}
    for key, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise Drop("bad_weight", f"{where}: {key} must be 0 or 1, found {mark!r:.100}")
    return {} if all(marks.values()) else {"trained": False}


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    if role == "tool" and isinstance(content, dict | list):
        return json.dumps(content, ensure_ascii=False, default=str)  # dates of parquet files
    if not isinstance(content, str):
        raise Drop("not_text", f"{where}: content must be text, found {content!r:.100}")
    return content


def as_tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """One call or a list, as objects or JSON text -> [{"type", "function": {name, arguments}}].

    Raises:
        Drop: not JSON, no name, or arguments that are not an object.
    """
    value = _loads(value, "bad_tool_call", where)
    calls: list[dict[str, Any]] = []
    for call in value if isinstance(value, list) else [value]:
        call = _loads(call, "bad_tool_call", where)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Drop("bad_tool_call", f"{where}: a call without a name: {call!r:.100}")
        arguments = function.get("arguments", function.get("parameters"))
        # an explicit null in JSON text is meant, and stays
        arguments = _loads(arguments or {}, "bad_tool_call", where)
        if not function["name"] or not isinstance(arguments, dict):
            raise Drop("bad_tool_call", f"{where}: arguments are no object: {call!r:.100}")
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append({**kept, "type": "function", "function": function})
    return calls


def as_tools(value: Any) -> list[dict[str, Any]]:
    """Tools as a list, one object or JSON text -> [{"type": "function", "function": {...}}].

    Raises:
        Drop: not JSON, or a tool without a name.
    """
    if is_null(value) or (isinstance(value, str) and not value.strip()):
        return []
    # nulls in JSON text were written there; elsewhere a columnar file has put them in
    value = _loads(without_nulls(value), "bad_tools", "tools")
    tools: list[dict[str, Any]] = []
    for tool in value if isinstance(value, list) else [value]:
        tool = _loads(tool, "bad_tools", "tools")
        if tool is None or tool == {}:
            continue
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            function = tool["function"]
        else:
            function = (
                {k: v for k, v in tool.items() if k != "type"} if isinstance(tool, dict) else {}
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Drop("bad_tools", f"a tool without a name: {tool!r:.100}")
        tools.append({"type": "function", "function": function})
    return tools


def _tools(row: Row) -> list[dict[str, Any]]:
    return as_tools(row.get("tools")) or as_tools(row.get("functions"))  # OpenAI's older name


def _loads(value: Any, reason: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Drop(reason, f"{where}: invalid JSON ({error}): {value!r:.100}") from error


def without_nulls(value: Any) -> Any:
    """The value without null entries of its objects, at any depth; JSON text is left alone."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


# ---- one function per format: row -> prompt, completion ------------------------------------------

Exchange = tuple[str | Messages, str | Messages]
"""prompt, completion"""


def _system(row: Row) -> str:
    system = as_text(row.get("system"), "system")
    return system if system.strip() else ""


def _prepend(system: str, messages: Messages) -> Messages:
    if messages and messages[0]["role"] in _SYSTEM:
        if messages[0]["content"] != system:
            raise Drop("two_system_prompts", "the column `system` and a system turn differ")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _with_system(row: Row, prompt: str | Messages, completion: str | Messages) -> Exchange:
    """The pair as a chat that begins with the column `system`, if there is one."""
    system = _system(row)
    if not system or not completion:
        return prompt, completion
    if isinstance(completion, str) and (prompt == [] or not completion.strip()):
        return prompt, completion  # text that is all in one column is complete
    if isinstance(prompt, str):
        has_turn = prompt or isinstance(completion, str)
        prompt = [{"role": "user", "content": prompt}] if has_turn else []
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if prompt:
        return _prepend(system, prompt), completion
    return prompt, _prepend(system, completion)


def _conversation(row: Row, column: str) -> Messages:
    messages, system = as_messages(row[column], column), _system(row)
    return _prepend(system, messages) if system else messages


def _messages(row: Row) -> Exchange:
    return [], _conversation(row, "messages")


def _conversations(row: Row) -> Exchange:
    return [], _conversation(row, "conversations")


def _prompt_completion(row: Row) -> Exchange:
    prompt, completion = (
        "" if is_null(row[name]) else text_or_messages(row[name], name)
        for name in ("prompt", "completion")
    )
    if prompt and completion and isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError("prompt and completion must both be text or both be messages")
    if completion and not isinstance(completion, str):
        prompt = prompt or []
    return prompt, completion


def _question(row: Row) -> str:
    return as_text(row["question"], "question")


def _question_answer(row: Row) -> Exchange:
    return _question(row), as_text(row["answer"], "answer")


def _text(row: Row) -> Exchange:
    return [], "" if is_null(row["text"]) else text_or_messages(row["text"], "text")


def _instruction(row: Row) -> str | Messages:
    """Instruction and input, after the turns of the history if there are any."""
    parts = [as_text(row.get(name), name) for name in ("instruction", "input")]
    prompt = "\n\n".join(part for part in parts if part)
    history = [] if is_null(row.get("history")) else row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"history: expected a list of [user, assistant], found {history!r:.200}")
    if not history:
        return prompt
    messages: Messages = []
    for pair in history:
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": as_text(text, "history")})
    return [*messages, {"role": "user", "content": prompt}]


def _instruction_output(row: Row) -> Exchange:
    prompt, output = _instruction(row), as_text(row["output"], "output")
    return prompt, output if isinstance(prompt, str) else _as_turns(output, "assistant")


def _as_turns(part: str | Messages, role: str) -> Messages:
    if isinstance(part, str):
        return [{"role": role, "content": part}] if part else []
    return part


def _response_after(prompt: str | Messages, row: Row, column: str) -> Exchange:
    """Prompt and response; the column may repeat the prompt, with or without a system turn."""
    response = row[column]
    if isinstance(response, str) and isinstance(prompt, str):
        return prompt, response
    prompt = _as_turns(prompt, "user")
    if isinstance(response, str):
        completion = _as_turns(response, "assistant")
    else:
        completion = as_messages([response] if isinstance(response, dict) else response, column)
    systems = [m for m in prompt[:1] if m["role"] in _SYSTEM]
    asked = prompt[len(systems) :]
    start = int(bool(completion) and completion[0]["role"] in _SYSTEM)
    repeated = completion[start : start + len(asked)]
    if asked and [_said(m) for m in repeated] == [_said(m) for m in asked]:
        context = completion[:start] or systems
        return context + asked, completion[start + len(asked) :]
    return prompt, completion


def _said(message: dict[str, Any]) -> tuple[str, str]:
    return message["role"], message["content"]


def _conversations_chosen(row: Row) -> Exchange:
    return _response_after(_conversation(row, "conversations"), row, "chosen")


def _text_or_turns(row: Row, column: str) -> str | Messages:
    return "" if is_null(row[column]) else text_or_messages(row[column], column)


def _prompt_chosen(row: Row) -> Exchange:
    return _response_after(_text_or_turns(row, "prompt"), row, "chosen")


def _question_chosen(row: Row) -> Exchange:
    return _response_after(_question(row), row, "chosen")


def _instruction_chosen(row: Row) -> Exchange:
    return _response_after(_instruction(row), row, "chosen")


def _chosen(row: Row) -> Exchange:
    chosen = _conversation(row, "chosen")
    rejected = as_messages(row["rejected"], "rejected") if row.get("rejected") else []
    turns = [i for i, message in enumerate(chosen) if message["role"] == "assistant"]
    # the prompt is what both sides share, or else everything before the last answer
    split = num_common(chosen, rejected)
    if split == len(rejected) or not any(i >= split for i in turns):
        split = turns[-1] if turns else 0
    return chosen[:split], chosen[split:]


# ---- one function per preference format: row -> prompt and response of both sides ----------------


def _pair_after(prompt: str | Messages, row: Row) -> list[Exchange]:
    sides = [_response_after(prompt, row, column) for column in _SIDES]
    if not all(isinstance(r, list) and r and r[0]["role"] != "assistant" for _, r in sides):
        return sides
    # conversations that do not begin with the prompt: it asks nothing, or is their last question
    turns = _as_turns(prompt, "user")
    systems = [m for m in turns[:1] if m["role"] in _SYSTEM]
    asked = turns[len(systems) :]
    whole = [_as_turns(response, "assistant") for _, response in sides]
    split = _split_alike(*(w if w[0]["role"] in _SYSTEM else systems + w for w in whole))
    shared, _ = split[0]
    if asked and [_said(m) for m in shared[-len(asked) :]] != [_said(m) for m in asked]:
        raise Drop("prompts_differ", "neither side goes on from the prompt")
    return list[Exchange](split)


def _split_alike(chosen: Messages, rejected: Messages) -> list[tuple[Messages, Messages]]:
    """The prompt is what both begin with; of equal ones, all but the last answer."""
    split = num_common(chosen, rejected)
    if chosen == rejected:
        answers = [i for i, message in enumerate(chosen) if message["role"] == "assistant"]
        split = answers[-1] if answers else split
    return [(side[:split], side[split:]) for side in (chosen, rejected)]


def _split_texts(chosen: str, rejected: str) -> list[Exchange]:
    """The prompt is what both begin with, up to white space, which belongs to the responses.

    Of dialogues that mark their speakers as HH-RLHF does, it ends with the last mark they share.
    """
    split = num_common(chosen, rejected)
    marked = chosen.rfind(_HH_ANSWER, 0, split)
    if _HH_ANSWER in chosen and chosen.lstrip().startswith("Human:"):
        if marked < 0:
            raise Drop("prompts_differ", "the dialogues differ before the first Assistant: turn")
        split = marked + len(_HH_ANSWER)
    else:  # if one text goes on from the end of the other, their last word is a response as well
        goes_on = not (chosen[split:].strip() and rejected[split:].strip())
        space = re.search(r"\s+\S+\s*\Z" if goes_on else r"\s+\S*\Z", chosen[:split])
        split = space.start() if space else 0
    return [(side[:split], side[split:]) for side in (chosen, rejected)]


def _conversations_pair(row: Row) -> list[Exchange]:
    return _pair_after(_conversation(row, "conversations"), row)


def _prompt_pair(row: Row) -> list[Exchange]:
    return _pair_after(_text_or_turns(row, "prompt"), row)


def _question_pair(row: Row) -> list[Exchange]:
    return _pair_after(_question(row), row)


def _instruction_pair(row: Row) -> list[Exchange]:
    return _pair_after(_instruction(row), row)


def _messages_pair(row: Row) -> list[Exchange]:
    messages = _conversation(row, "messages")
    if isinstance(row["chosen"], list) and messages == _conversation(row, "chosen"):
        return _pair_alone(row)
    return _pair_after(messages, row)


def _pair_alone(row: Row) -> list[Exchange]:
    texts = ["" if is_null(row[column]) else row[column] for column in _SIDES]
    if any(texts) and all(isinstance(text, str) for text in texts):
        lost = [
            name
            for name, value in row.items()
            if name.lower() in _PROMPTS and not is_null(value)
            if str(value).strip() and value not in ([], {})
        ]
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: would be lost, since no column is known to be the prompt of "
                f"the texts chosen and rejected; columns {sorted(row)}; accepted: "
                f"{PREFERENCE_FORMATS}"
            )
        return _split_texts(*texts)
    return list[Exchange](_split_alike(*(_conversation(row, column) for column in _SIDES)))


# in order: of several that fit the first one counts
_FORMATS: dict[str, Callable[[Row], Exchange]] = {
    "messages": _messages,
    "conversations+chosen": _conversations_chosen,
    "conversations": _conversations,
    "prompt+completion": _prompt_completion,
    "prompt+chosen": _prompt_chosen,
    "question+answer": _question_answer,
    "instruction+output": _instruction_output,
    "question+chosen": _question_chosen,
    "instruction+chosen": _instruction_chosen,
    "text": _text,
    "chosen": _chosen,
}
_PAIR_FORMATS: dict[str, Callable[[Row], list[Exchange]]] = {
    "conversations+chosen+rejected": _conversations_pair,
    "prompt+chosen+rejected": _prompt_pair,
    "messages+chosen+rejected": _messages_pair,
    "question+chosen+rejected": _question_pair,
    "instruction+chosen+rejected": _instruction_pair,
    "chosen+rejected": _pair_alone,
}
