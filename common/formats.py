"""Dataset rows in any accepted format -> messages and tools in one form.

The format is detected per row from its columns. What is wrong with a column is a `ValueError`; what
is wrong inside a conversation drops the row, with a reason to count and a detail to show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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
    "question+answer, instruction(+input)+output, text, chosen"
)
RL_FORMATS = (
    "prompt (text or messages), question+answer, verl rows (prompt, reward_model.ground_truth)"
)
_ROLES = {
    **dict.fromkeys(("system", "developer"), ""),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response"), "tool"),
    "function_call": "function_call",
}
_EXPECTED = "a list of {role, content} messages"
_TRAINED = ("weight", "train", "trainable", "trained")
"""what datasets call a mark that is 0 or false on a turn that is not to be learned"""
_REASONING = ("reasoning_content", "thinking", "reasoning")


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


def detect_format(row: Row) -> str:
    """Name of an SFT or preference row's format: the columns it needs, joined by +.

    Raises:
        ValueError: unknown columns.
    """
    # columnar files fill the columns of other rows' formats with null
    for columns in ({name for name, value in row.items() if not is_null(value)}, set(row)):
        for name in _FORMATS:
            if columns.issuperset(name.split("+")):
                return name
    raise ValueError(f"unknown format: columns {sorted(row)}; accepted: {SFT_FORMATS}")


def parse_row(row: Row, name: str) -> Example:
    """Read a row of a detected format; of preferences the chosen side.

    Raises:
        Drop: something inside the conversation or the tools cannot be used.
        ValueError: a column of the wrong type.
    """
    prompt, completion = _with_system(row, *_FORMATS[name](row))
    return Example(prompt, completion, _tools(row))


def parse_prompt(row: Row) -> tuple[str, str | Messages, list[dict[str, Any]]]:
    """Column name, prompt (without null entries) and tools of an RL row; raises as `parse_row`."""
    if "prompt" not in row and not {"question", "answer"} <= set(row):
        raise ValueError(f"unknown format: columns {sorted(row)}; accepted: {RL_FORMATS}")
    key = "prompt" if "prompt" in row else "question"
    prompt = "" if is_null(row[key]) else text_or_messages(row[key], key)
    if prompt and (system := _system(row)):
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        prompt = _prepend(system, prompt)
    if not isinstance(prompt, str):
        prompt = [{k: v for k, v in message.items() if k != "trained"} for message in prompt]
    return key, prompt, _tools(row)


def is_null(value: Any) -> bool:
    """Whether a column is empty: null, or NaN or infinity, as pandas writes missing values."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


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
    for number, raw in enumerate(value, start=1):
        message = _message(raw, f"message {number}")
        if message.pop("is_call", False) and messages and messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", []) + message["tool_calls"]
            messages[-1] = message | messages[-1] | {"tool_calls": calls}
        elif message["role"] not in ("system", "developer") or message["content"].strip():
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

Pair = tuple[str | Messages, str | Messages]


def _system(row: Row) -> str:
    system = as_text(row.get("system"), "system")
    return system if system.strip() else ""


def _prepend(system: str, messages: Messages) -> Messages:
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != system:
            raise Drop("two_system_prompts", "the column `system` and a system turn differ")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _with_system(row: Row, prompt: str | Messages, completion: str | Messages) -> Pair:
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


def _messages(row: Row) -> Pair:
    return [], _conversation(row, "messages")


def _conversations(row: Row) -> Pair:
    return [], _conversation(row, "conversations")


def _prompt_completion(row: Row) -> Pair:
    prompt, completion = (
        "" if is_null(row[name]) else text_or_messages(row[name], name)
        for name in ("prompt", "completion")
    )
    if prompt and completion and isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError("prompt and completion must both be text or both be messages")
    if completion and not isinstance(completion, str):
        prompt = prompt or []
    return prompt, completion


def _question_answer(row: Row) -> Pair:
    return as_text(row["question"], "question"), as_text(row["answer"], "answer")


def _text(row: Row) -> Pair:
    return [], "" if is_null(row["text"]) else text_or_messages(row["text"], "text")


def _instruction(row: Row) -> Pair:
    names = ("instruction", "input", "output")
    instruction, extra, output = (as_text(row.get(name), name) for name in names)
    prompt = "\n\n".join(part for part in (instruction, extra) if part)
    history = [] if is_null(row.get("history")) else row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"history: expected a list of [user, assistant], found {history!r:.200}")
    if not history:
        return prompt, output
    messages: Messages = []
    for pair in history:
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": as_text(text, "history")})
    messages.append({"role": "user", "content": prompt})
    return messages, [{"role": "assistant", "content": output}] if output else ""


def _chosen_after(prompt: str | Messages, chosen: Any) -> Pair:
    if isinstance(chosen, str) and isinstance(prompt, str):
        return prompt, chosen
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(chosen, str):
        chosen = [{"role": "assistant", "content": chosen}] if chosen else []
    completion = as_messages([chosen] if isinstance(chosen, dict) else chosen, "chosen")
    # `chosen` may repeat the prompt, with or without a system turn
    systems = [m for m in prompt[:1] if m["role"] in ("system", "developer")]
    asked = prompt[len(systems) :]
    for start in (0, 1) if asked else ():
        repeated = completion[start : start + len(asked)]
        if [_said(m) for m in repeated] == [_said(m) for m in asked]:
            context = completion[:start] or systems
            return context + asked, completion[start + len(asked) :]
    return prompt, completion


def _said(message: dict[str, Any]) -> tuple[str, str]:
    return message["role"], message["content"]


def _conversations_chosen(row: Row) -> Pair:
    return _chosen_after(_conversation(row, "conversations"), row["chosen"])


def _prompt_chosen(row: Row) -> Pair:
    prompt = "" if is_null(row["prompt"]) else text_or_messages(row["prompt"], "prompt")
    return _chosen_after(prompt, row["chosen"])


def _chosen(row: Row) -> Pair:
    chosen = _conversation(row, "chosen")
    rejected = as_messages(row["rejected"], "rejected") if row.get("rejected") else []
    turns = [i for i, message in enumerate(chosen) if message["role"] == "assistant"]
    # the prompt is what both sides share, or else everything before the last answer
    split = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None
    )
    if split is None or not any(i >= split for i in turns):
        split = turns[-1] if turns else 0
    return chosen[:split], chosen[split:]


# in order: of several that fit the first one counts
_FORMATS: dict[str, Callable[[Row], Pair]] = {
    "messages": _messages,
    "conversations+chosen": _conversations_chosen,
    "conversations": _conversations,
    "prompt+completion": _prompt_completion,
    "prompt+chosen": _prompt_chosen,
    "question+answer": _question_answer,
    "instruction+output": _instruction,
    "text": _text,
    "chosen": _chosen,
}
