"""Rows in any accepted format -> token ids and masks; chat templates, length limits, drop counts.

Rules: one BOS and one stop token, wherever the template or tokenizer wants them; masks come from
token positions, never from comparing ids with the pad id; nothing is truncated: rows that do not
fit are dropped and counted by reason.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from jinja2.exceptions import TemplateError

Messages = list[dict[str, Any]]
PromptFormat = Literal["auto", "chat", "text"]
Row = dict[str, Any]
T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant")
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
RL_FORMATS = (
    "prompt (text or messages), question+answer, verl rows (prompt, reward_model.ground_truth)"
)
SFT_FORMATS = (
    "messages, prompt+completion, question+answer, text, instruction(+input)+output, conversations"
)


@dataclass
class PromptRow:
    """One RL prompt."""

    prompt_ids: list[int]
    """what the engine continues; generation prompt included"""
    prompt: str | Messages
    """as in the dataset (without `system_prompt`); reward functions get this"""
    columns: dict[str, Any]
    """every other column of the row, plus `ground_truth` for verl rows"""


@dataclass
class TokenRow:
    """One SFT sequence; `loss_mask[t]` is True iff token t is a target (never for t = 0)."""

    input_ids: list[int]
    loss_mask: list[bool]


# ---- files ---------------------------------------------------------------------------------------


def read_rows(
    paths: Sequence[str], flag: str = "--dataset", split: str = "train"
) -> list[dict[str, Any]]:
    """Read and concatenate datasets.

    Args:
        paths: each a .jsonl, .json, .jsonl.gz, .json.gz or .parquet file; a directory of those (if
            some of its file names contain the split as a word, only these); or a hub name,
            `name` or `name:config`.
        flag: command line flag to name in errors.
        split: split of a hub dataset or directory.
    Raises:
        ValueError: missing or empty dataset, invalid JSON (with file and line), a row that is not
            an object.
    """
    # resolve every name first: a typo in the last one shows before the first is read
    sources = [source for path in paths for source in _resolve(path, flag, split)]
    rows: list[Any] = []
    for source in sources:
        name = str(source)
        if isinstance(source, str):
            new: Iterable[Any] = _read_hub(source, flag, split)
        elif name.endswith(".parquet"):
            import pyarrow.parquet  # slow to import, needed by few

            new = pyarrow.parquet.read_table(
                source
            ).to_pylist()  # plain lists and dicts, no numpy arrays
        else:
            new = _read_json(source, flag)
        start = len(rows)
        for row in new:
            if not isinstance(row, dict):
                number = len(rows) - start + 1
                raise ValueError(
                    f"{flag}={name}: row {number} is a {type(row).__name__}, not an object"
                )
            rows.append(row)
        if len(rows) == start:
            raise ValueError(f"{flag}={name}: no rows")
    if not rows:
        raise ValueError(f"{flag}={' '.join(paths)}: no dataset given")
    return rows


def _resolve(path: str, flag: str, split: str) -> list[Path | str]:
    """Files as Path, hub names as str."""
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(f for f in local.iterdir() if f.name.lower().endswith(SUFFIXES))
        if not files:
            raise ValueError(f"{flag}={path}: the directory has no {', '.join(SUFFIXES)} file")
        # a directory with train and test files must not train on the test rows
        of_split = [f for f in files if split in re.split(r"[^a-z]+", f.name.lower())]
        return list(of_split or files)
    if local.is_file():
        if not local.name.lower().endswith(SUFFIXES):
            raise ValueError(
                f"{flag}={path}: expected {', '.join(SUFFIXES)}, a directory or a hub name"
            )
        return [local]
    if path.lower().endswith(SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"{flag}={path}: no such file or directory")
    return [path]


def _read_json(path: Path, flag: str) -> list[Any]:
    name = path.name.lower()
    opener = gzip.open if name.endswith(".gz") else open
    rows: list[Any] = []
    number = 0
    try:
        # utf-8-sig: Windows editors write a byte order mark
        with opener(path, "rt", encoding="utf-8-sig") as file:
            if name.removesuffix(".gz").endswith(".json"):
                if (text := file.read()).lstrip().startswith("["):
                    return json.loads(text)
                file.seek(0)  # one object per line, under the other name
            for line in file:
                number += 1
                if line.strip():
                    rows.append(json.loads(line))
    except json.JSONDecodeError as error:
        line_number = number or error.lineno
        raise ValueError(
            f"{flag}={path}: invalid JSON in line {line_number}: {error.msg}"
        ) from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}={path}: cannot be read after line {number}: {error}") from error
    return rows


def _read_hub(path: str, flag: str, split: str) -> list[Any]:
    import datasets  # seconds to import, needed by few

    name, _, config = path.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split).to_list()
    except (OSError, ValueError) as error:  # not found, no network, unknown config or split
        raise ValueError(
            f"{flag}={path}: no such local file, and the hub says: {error} (split {split!r})"
        ) from error


# ---- tokenising ----------------------------------------------------------------------------------


def stop_token_ids(tokenizer: Any, generation_config: Any | None = None) -> list[int]:
    """All ids that end a turn, sorted: EOS of tokenizer and generation config, template's own."""
    ids = {tokenizer.eos_token_id, _template_terminator(tokenizer)}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def _template_terminator(tokenizer: Any) -> int | None:
    """First special token that the chat template writes after the text of an assistant turn."""
    if not tokenizer.chat_template:
        return None
    content = "Paris"
    chat = [{"role": "user", "content": "France?"}, {"role": "assistant", "content": content}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except TemplateError:
        return None
    ids = tokenizer(text.rpartition(content)[2], add_special_tokens=False)["input_ids"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return next((i for i in ids if i in special), None)


@dataclass
class _Encoder:
    """Tokenizer plus the settings that decide how a conversation becomes ids."""

    tokenizer: Any
    system_prompt: str | None
    prompt_format: PromptFormat
    flag: str

    def __post_init__(self) -> None:
        self.has_template = bool(self.tokenizer.chat_template)
        if self.prompt_format not in ("auto", "chat", "text"):
            raise ValueError(f"--prompt_format={self.prompt_format}: expected auto, chat or text")
        if self.prompt_format == "chat" and not self.has_template:
            raise ValueError("--prompt_format=chat: the tokenizer has no chat template")
        if self.system_prompt and (self.prompt_format == "text" or not self.has_template):
            raise ValueError(
                "--system_prompt needs a chat template, but prompts are formatted as plain text"
            )
        # what the tokenizer writes before a text; what it writes after (EOS) is wrong in a prompt
        bare, full = self._ids("a"), self.tokenizer("a")["input_ids"]
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        self.prefix: list[int] = full[: starts[0]] if starts else []

    def _ids(self, text: str) -> list[int]:
        # verbose: no warning about lengths beyond the model's; the caller drops those
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Plain text with the tokenizer's BOS exactly once (the text may spell it), without EOS."""
        ids = self._ids(text)
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def chat(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        """Ids of a rendered chat; whether there is a BOS is up to the template."""
        if self.system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
        )

    def as_chat(self, prompt: str | Messages) -> bool:
        """Whether a prompt goes through the chat template."""
        if self.prompt_format == "text":
            return False
        if not isinstance(prompt, str) and not self.has_template:
            raise ValueError(
                f"{self.flag}: rows have messages, but the tokenizer has no chat template; "
                "use --prompt_format=text or a tokenizer with a template"
            )
        return self.has_template

    def prompt(self, prompt: str | Messages) -> list[int]:
        """Ids that the model continues."""
        if self.as_chat(prompt):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.chat(messages, add_generation_prompt=True)
        return self.plain(prompt if isinstance(prompt, str) else self._only_text(prompt, "user"))

    def _only_text(self, messages: Messages, role: str) -> str:
        if len(messages) != 1 or messages[0]["role"] != role:
            roles = [m["role"] for m in messages]
            raise ValueError(f"--prompt_format=text: expected a single {role} turn, found {roles}")
        return messages[0]["content"]

    def completion(self, prompt: str | Messages, completion: str | Messages) -> TokenRow:
        """Plain text: prompt, completion, one EOS; the completion and EOS are targets."""
        target = (
            completion if isinstance(completion, str) else self._only_text(completion, "assistant")
        )
        source = prompt if isinstance(prompt, str) else self._only_text(prompt, "user")
        prompt_ids, ids = self.plain(source), self.plain(source + target)
        # a token across the boundary cannot be generated: a rollout starts from the prompt's ids
        if not target or ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + self._ids(target)
        return self._row(ids, first_target=len(prompt_ids) if target.strip() else len(ids) + 1)

    def text(self, text: str) -> TokenRow:
        """Plain text and one EOS; everything but the first token is a target."""
        if self.system_prompt:
            raise ValueError("--system_prompt has no place in `text` rows")
        return self._row(self.plain(text), first_target=1)

    def _row(self, ids: list[int], *, first_target: int) -> TokenRow:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no EOS token: a model trained on plain text could not stop"
            )
        if ids[-1:] != [eos]:
            ids = [*ids, eos]
        return TokenRow(ids, [t >= max(1, first_target) for t in range(len(ids))])

    def conversation(self, messages: Messages, first_trained: int, stop_ids: set[int]) -> TokenRow:
        """Chat; targets are the assistant turns from message `first_trained` on.

        A turn's targets are exactly what the engine would sample there: they begin where the
        rendered prompt of that turn ends, and end with the first stop token (what a template
        writes after it, often a newline, is not sampled).
        """
        ids = self.chat(messages, add_generation_prompt=False)
        mask = [False] * len(ids)
        for i in range(first_trained, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            if i == 0:  # templates cannot render an empty prompt
                raise _Drop("starts_with_assistant")
            prompt = self.chat(messages[:i], add_generation_prompt=True)
            start = len(prompt)
            end = next((t for t in range(start, len(ids)) if ids[t] in stop_ids), None)
            if ids[:start] != prompt or end is None:
                raise _Drop("template_prefix")  # the template rewrites history, or tokens merge
            mask[start : end + 1] = [True] * (end + 1 - start)
        return TokenRow(ids, mask)


# ---- rows ----------------------------------------------------------------------------------------


class _Drop(Exception):
    """The row cannot be used; the argument is the reason to count."""


def _as_messages(value: Any) -> Messages:
    """Messages with text content and without null entries, which columnar files add to all rows.

    Raises:
        _Drop: tools or other roles, which this loader does not train on.
        ValueError: not a list of {role, content}, or content that is not text.
    """
    if not isinstance(value, list) or not all(isinstance(m, dict) and m.get("role") for m in value):
        raise ValueError(
            f"expected text or a list of {{role, content}} messages, found {value!r:.200}"
        )
    messages: Messages = []
    for message in value:
        clean = {k: v for k, v in message.items() if v is not None}
        if clean["role"] not in ROLES or clean.get("tool_calls"):
            raise _Drop("tools_not_supported")
        content = clean.get("content", "")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            texts = [text for text in texts if isinstance(text, str)]
            content = "".join(texts) if len(texts) == len(content) else content
        if not isinstance(content, str):
            raise ValueError(f"message content must be text, found {content!r:.200}")
        messages.append({**clean, "content": content})
    return messages


def _text_or_messages(value: Any) -> str | Messages:
    return value if isinstance(value, str) else _as_messages(value)


def _unknown_columns(row: Row, accepted: str) -> ValueError:
    return ValueError(f"unknown format: columns {sorted(row)}; accepted: {accepted}")


def _prompt_row(row: Row, encoder: _Encoder, max_prompt_tokens: int) -> PromptRow:
    if "prompt" not in row and not {"question", "answer"} <= set(row):
        raise _unknown_columns(row, RL_FORMATS)
    key = "prompt" if "prompt" in row else "question"
    columns = {name: value for name, value in row.items() if name != key}
    grading = columns.get("reward_model")
    if isinstance(grading, dict) and "ground_truth" in grading:
        columns.setdefault("ground_truth", grading["ground_truth"])
    prompt = "" if row[key] is None else _text_or_messages(row[key])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not any(m["content"].strip() for m in turns if m["role"] != "system"):
        raise _Drop("empty_prompt")
    if turns[-1]["role"] == "assistant":
        raise _Drop("prompt_ends_with_assistant")
    prompt_ids = encoder.prompt(prompt)
    if not prompt_ids:  # a tokenizer may normalise a text away
        raise _Drop("empty_prompt")
    if len(prompt_ids) > max_prompt_tokens:
        raise _Drop("too_long")
    return PromptRow(prompt_ids, prompt, columns)


def _token_row(row: Row, encoder: _Encoder, max_tokens: int, stop_ids: set[int]) -> TokenRow:
    if row.get("tools"):
        raise _Drop("tools_not_supported")
    prompt: str | Messages = []
    if "messages" in row:
        completion = _as_messages(row["messages"] or [])
    elif {"prompt", "completion"} <= set(row):
        prompt, completion = (_text_or_messages(row[k] or "") for k in ("prompt", "completion"))
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError("prompt and completion must both be text or both be messages")
    elif {"question", "answer"} <= set(row):
        prompt, completion = str(row["question"] or ""), str(row["answer"] or "")
    elif "text" in row:
        completion = _text_or_messages(row["text"] or "")
    elif {"instruction", "output"} <= set(row):
        prompt = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        completion = row["output"] or ""
    elif "conversations" in row:
        roles = {"human": "user", "gpt": "assistant"}
        completion = _as_messages(
            [
                {"role": roles.get(m.get("from"), m.get("from")), "content": m.get("value")}
                for m in row["conversations"] or []
            ]
        )
        if row.get("system"):
            completion.insert(0, {"role": "system", "content": row["system"]})
    else:
        raise _unknown_columns(row, SFT_FORMATS)

    if not completion:
        raise _Drop("no_target")
    if isinstance(completion, str) and isinstance(prompt, list):
        result = encoder.text(completion)
    elif encoder.as_chat(completion):
        if isinstance(prompt, str):
            assert isinstance(completion, str)
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        assert isinstance(completion, list)
        result = encoder.conversation(prompt + completion, len(prompt), stop_ids)
    else:
        if not prompt:
            prompt, completion = completion[:-1], completion[-1:]
        result = encoder.completion(prompt, completion)
    if not any(result.loss_mask):
        raise _Drop("no_target")
    if len(result.input_ids) > max_tokens:
        raise _Drop("too_long")
    return result


def _convert(
    rows: list[Row], convert: Callable[[Row], T], flag: str, limit: str
) -> tuple[list[T], dict[str, int]]:
    """Apply `convert` to every row; counts what it drops, adds the row number to what it raises."""
    kept: list[T] = []
    drops: Counter[str] = Counter()
    refusal = ""
    for number, row in enumerate(rows, start=1):
        try:
            kept.append(convert(row))
        except _Drop as drop:
            drops[str(drop)] += 1
        except TemplateError as error:  # for example a template that insists on alternating roles
            drops["template_error"] += 1
            refusal = refusal or f"; the chat template says: {error}"
        except ValueError as error:
            raise ValueError(f"{flag}: row {number}: {error}") from error
        except Exception as error:  # noqa: BLE001  odd values in a row, or code in a template
            raise ValueError(f"{flag}: row {number}: {type(error).__name__}: {error}") from error
    if not kept:
        raise ValueError(
            f"{flag}: all {len(rows)} rows were dropped: {dict(drops)} ({limit}){refusal}"
        )
    return kept, dict(drops)


def load_prompts(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    system_prompt: str | None = None,
    prompt_format: PromptFormat = "auto",
    flag: str = "--dataset",
    split: str = "train",
) -> tuple[list[PromptRow], dict[str, int]]:
    """RL prompts as token ids.

    Args:
        paths: see `read_rows`. Formats: `prompt` (text or messages), `question`+`answer`, verl.
        max_prompt_tokens: longer prompts (generation prompt included) are dropped, never truncated.
        system_prompt: put before prompts that have no system turn.
        prompt_format: auto (chat template if there is one), chat (insist on it), text (plain).
    Returns:
        Rows in file order, and the number of dropped rows by reason.
    Raises:
        ValueError: unreadable data, unknown columns, a format that does not fit, or no row left.
    """
    encoder = _Encoder(tokenizer, system_prompt, prompt_format, flag)
    rows = read_rows(paths, flag, split)
    return _convert(
        rows,
        lambda row: _prompt_row(row, encoder, max_prompt_tokens),
        flag,
        f"{max_prompt_tokens=}",
    )


def load_sft_rows(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    max_tokens: int,
    system_prompt: str | None = None,
    prompt_format: PromptFormat = "auto",
    flag: str = "--dataset",
    split: str = "train",
) -> tuple[list[TokenRow], dict[str, int]]:
    """SFT sequences as token ids and loss masks; targets are all assistant turns with their stop.

    Args:
        paths: see `read_rows`. Formats: `messages`, `prompt`+`completion`, `text` (never
            templated), `instruction`(+`input`)+`output`, `conversations`.
        max_tokens: longer rows are dropped, never truncated.
        system_prompt, prompt_format: as in `load_prompts`.
    Returns:
        Rows in file order, and the number of dropped rows by reason.
    Raises:
        ValueError: as `load_prompts`; also a chat template that ends turns without a stop token.
    """
    encoder = _Encoder(tokenizer, system_prompt, prompt_format, flag)
    rows = read_rows(paths, flag, split)
    stop_ids = set(stop_token_ids(tokenizer))
    if encoder.has_template and prompt_format != "text" and _template_terminator(tokenizer) is None:
        raise ValueError(
            "the chat template ends assistant turns without a special token: the model could not "
            "learn to stop; use another template or --prompt_format=text"
        )
    return _convert(
        rows, lambda row: _token_row(row, encoder, max_tokens, stop_ids), flag, f"{max_tokens=}"
    )


def render_example(row: TokenRow | PromptRow, tokenizer: Any, *, max_chars: int = 600) -> str:
    """Decoded row with «trained tokens» marked; longer stretches are cut in their middle."""
    ids, mask = (
        (row.input_ids, row.loss_mask)
        if isinstance(row, TokenRow)
        else (row.prompt_ids, [False] * len(row.prompt_ids))
    )
    starts = [t for t in range(len(mask)) if t == 0 or mask[t] != mask[t - 1]]
    parts: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(mask)], strict=True):
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if len(text) > max_chars:
            half = max_chars // 2
            text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
        parts.append(f"«{text}»" if mask[start] else text)
    return "".join(parts)
