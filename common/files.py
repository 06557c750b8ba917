"""Names on the command line -> rows: files, folders and hub datasets, whole or a slice of them.

Every name is resolved before the first is read. Each problem is a `ValueError` that starts with
`--flag=name` and tells the file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
WRAPPERS = ("data", "rows", "examples", "instances")

_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")
_SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass
class Source:
    """One dataset name of the command line; a folder is one source of several files."""

    name: str
    """as on the command line"""
    flag: str
    files: tuple[Path, ...] = ()
    """empty for a hub dataset"""
    hub: tuple[str, str | None, str] = ("", None, "")
    """name, config, split"""
    bounds: tuple[str, str] = ("", "")
    """slice: start and stop, each empty, a row number or per cent"""
    _read: list[tuple[str, int]] = field(default_factory=list)
    """name and number of rows of every file read"""
    _start: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All rows, in file order.

        Raises:
            ValueError: cannot be read, a row that is not an object, no rows, an empty slice.
        """
        if not self.files:
            start, stop = self._range(len(self._hub_dataset))
            self._read = [(self.name, len(self._hub_dataset))]
            return self._hub_dataset.select(range(start, stop)).to_list()
        rows: list[dict[str, Any]] = []
        self._read = []
        for file in self.files:
            new = _read_file(file, f"{self.flag}={file}")
            self._read.append((file.name, len(new)))
            rows += new
        start, stop = self._range(len(rows))
        return rows[start:stop]

    def locate(self, index: int) -> str:
        """Where row `index` of the last `read()` came from; rows of a file count from 1."""
        index += self._start
        for name, size in self._read:
            if index < size:
                return f"row {index + 1} of {name}"
            index -= size
        raise IndexError(index)

    def fingerprint(self) -> str:
        """Changes whenever the rows can: hash of the files' names and contents, and the slice."""
        parts: list[Any] = [self.bounds]
        if not self.files:
            fingerprint = self._hub_dataset._fingerprint  # noqa: SLF001  no public name  # pyright: ignore[reportPrivateUsage]
            parts += [self.hub, fingerprint]
        for path in self.files:
            try:
                with path.open("rb") as file:
                    parts += [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
            except OSError as error:
                raise ValueError(f"{self.flag}={path}: cannot be read: {error}") from error
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def _hub_dataset(self) -> Any:
        import datasets  # seconds to import, needed by few
        from datasets.exceptions import DatasetsError

        name, config, split = self.hub
        try:
            return datasets.load_dataset(name, config, split=split)
        # not found, no network, unknown config or split, broken data files
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(
                f"{self.flag}={self.name}: no such local file, and the hub says: {error} "
                f"(split {split!r})"
            ) from error

    def _range(self, size: int) -> tuple[int, int]:
        start, stop = (_position(bound, size) for bound in self.bounds)
        self._start = start or 0
        stop = size if stop is None else stop
        if size == 0:
            raise ValueError(f"{self.flag}={self.name}: no rows")
        if self._start >= stop:
            raise ValueError(
                f"{self.flag}={self.name}: the slice is empty, the dataset has {size} rows"
            )
        return self._start, stop


def open_sources(paths: Sequence[str], *, flag: str, split: str) -> list[Source]:
    """Resolve dataset names; nothing is read yet.

    Args:
        paths: each a .jsonl, .json, .jsonl.gz, .json.gz or .parquet file; a folder of those (if
            some of its file names contain the split as a word, only these); or a hub name: `name`,
            `name:config`, `name:config:split` or `name::split`. Any of them may end in a slice of
            rows, `[:1000]`, `[100:200]`, `[-50:]`, or of per cents, `[:90%]`. A path that exists
            with brackets in its name is that path.
        flag: command line flag to name in errors.
        split: split of hub datasets that name none, and of folders.
    Raises:
        ValueError: nothing given, no such file, not a dataset, malformed slice.
    """
    if not paths:
        raise ValueError(f"{flag}: no dataset given")
    return [_resolve(path, flag, split) for path in paths]


def _resolve(name: str, flag: str, split: str) -> Source:
    path, bounds = name, ("", "")
    if name.endswith("]") and not _exists(name):
        path, bracket, rest = name.rpartition("[")
        match = _SLICE.fullmatch(bracket + rest)
        percents = [int(p) for p in re.findall(r"-?(\d+)%", rest)]
        if match is None or not path or max(percents, default=0) > 100:
            raise ValueError(
                f"{flag}={name}: expected a slice such as [:1000], [100:200], [-50:] or [:90%]"
            )
        bounds = (match[1] or "", match[2] or "")
    local = Path(os.path.expanduser(path))
    if not path or "\0" in path:
        raise ValueError(f"{flag}={name!r}: not a dataset name")
    if _exists(path) and local.is_dir():
        return Source(name, flag, _files_of_split(local, f"{flag}={name}", split), bounds=bounds)
    if _exists(path):
        if not (local.is_file() and local.name.lower().endswith(SUFFIXES)):
            raise ValueError(
                f"{flag}={name}: expected {', '.join(SUFFIXES)}, a directory or a hub name"
            )
        return Source(name, flag, (local,), bounds=bounds)
    if path.lower().endswith(SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"{flag}={name}: no such file or directory")
    hub, _, config = path.partition(":")
    config, _, own_split = config.partition(":")
    return Source(name, flag, hub=(hub, config or None, own_split or split), bounds=bounds)


def _files_of_split(folder: Path, label: str, split: str) -> tuple[Path, ...]:
    """The files whose names contain the split as a word; all, if none is named by any split.

    A folder with train and test files must not train on the test rows, nor evaluate on the others.
    """
    files = sorted(f for f in folder.iterdir() if f.name.lower().endswith(SUFFIXES) and f.is_file())
    if not files:
        raise ValueError(f"{label}: the directory has no {', '.join(SUFFIXES)} file")
    chosen = [f for f in files if _has_word(f.name, split)]
    if not chosen and any(_has_word(f.name, word) for f in files for word in _SPLIT_NAMES):
        raise ValueError(
            f"{label}: no file of split {split!r} among {', '.join(f.name for f in files):.300}"
        )
    return tuple(chosen or files)


def _has_word(name: str, word: str) -> bool:
    """train is a word of train-00001.jsonl and of my_train.jsonl, not of training.jsonl."""
    pattern = rf"(?<![a-z]){re.escape(word.lower())}(?![a-z])"
    return bool(word) and re.search(pattern, name.lower()) is not None


def _exists(name: str) -> bool:
    try:
        return Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # too long a name, NUL
        return False


def _position(bound: str, size: int) -> int | None:
    """Row index of a slice's bound; -10 % is the same place as 90 %."""
    if not bound:
        return None
    if bound.endswith("%"):
        percent = int(bound[:-1])
        return size * (percent + 100 if bound.startswith("-") else percent) // 100
    number = int(bound)
    return max(0, size + number) if number < 0 else min(number, size)


def _read_file(path: Path, label: str) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise ValueError(
                    f"{label}: a git-lfs pointer, not the data itself; run `git lfs pull`"
                )
    except OSError as error:
        raise ValueError(f"{label}: cannot be read: {error}") from error
    rows = _read_parquet(path, label) if path.name.lower().endswith(".parquet") else None
    rows = _read_json(path, label) if rows is None else rows
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{label}: row {number} is a {type(row).__name__}, not an object")
    if not rows:
        raise ValueError(f"{label}: no rows")
    return rows


def _read_parquet(path: Path, label: str) -> list[Any]:
    import pyarrow  # slow to import, needed by few
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()  # plain lists and dicts, no arrays
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise ValueError(f"{label}: not a readable parquet file: {error}") from error


def _read_json(path: Path, label: str) -> list[Any]:
    name = path.name.lower()
    opener: Callable[..., Any] = gzip.open if name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as file:
            if name.removesuffix(".gz").endswith(".json"):
                data = file.read()
                lines = _parse_whole(data, label)
                if isinstance(lines, list):
                    return lines
                file.seek(0)  # one object per line, under the other name
            rows: list[Any] = []
            # bytes: text files would also break lines at other characters than \n
            for number, line in enumerate(file, start=1):  # noqa: B007  used by the handlers
                # Windows editors write a byte order mark
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    rows.append(_parse(text, label, number))
            return rows
    except UnicodeDecodeError as error:
        raise ValueError(f"{label}: cannot be read: line {number or 1} is not UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{label}: cannot be read after line {number}: {error}") from error


def _parse_whole(data: bytes, label: str) -> list[Any] | None:
    """Rows of a .json file that holds one list or object; None if it has an object per line."""
    text = data.decode("utf-8-sig")
    if not text.strip():
        return []
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return None
        raise ValueError(f"{label}: invalid JSON in line {error.lineno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # too deep, or an integer of 4300 digits
        raise ValueError(f"{label}: invalid JSON: {error}") from error
    if isinstance(value, dict):
        inside = [value[key] for key in WRAPPERS if isinstance(value.get(key), list)]
        return inside[0] if len(inside) == 1 else [value]
    if not isinstance(value, list):
        raise ValueError(f"{label}: holds a {type(value).__name__}, not a list of objects")
    return value


def _parse(text: str, label: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: invalid JSON in line {number}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # too deep, or an integer of 4300 digits
        raise ValueError(f"{label}: invalid JSON in line {number}: {error}") from error
