"""Arrays that rank 0 makes and all ranks use: kept in a folder, mapped, or sent."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
import zlib
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common.dist import all_gather_objects

Arrays = dict[str, np.ndarray]


def cache_key(tokenizer: Any, *parts: Any) -> str:
    """Changes whenever tokenised data can.

    Args:
        tokenizer: vocabulary, special tokens and chat template count.
        parts: JSON values: fingerprints of the data, settings.
    Returns:
        A name for a folder; library versions and the code that makes the data are part of it.
    """
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary: Any = state | {"truncation": None, "padding": None}  # of the last call
    else:
        vocabulary = [sorted(tokenizer.get_vocab().items()), repr(tokenizer)]
    template = tokenizer.chat_template
    everything = [
        *(vocabulary, template, parts),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        date.today().isoformat() if "strftime_now" in str(template) else "",
        [version(name) for name in ("transformers", "tokenizers", "jinja2", "pyarrow")],
        [
            (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
            for name in ("cache", "chat", "data", "files", "formats", "pairs")
        ],
    ]
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def load_arrays(folder: Path, *, verify: bool = False) -> tuple[Arrays, dict[str, Any]] | None:
    """Memory-mapped arrays and their description; None if absent or damaged.

    Args:
        folder: from `save_arrays`.
        verify: read everything once and compare it with the checksums.
    """
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in about["shapes"]}
        whole = _shapes(arrays) == about["shapes"]
        if verify:
            whole = whole and _checksums(arrays) == about["checksums"]
        return (arrays, about["report"]) if whole else None
    except (OSError, ValueError, EOFError, LookupError, TypeError, SyntaxError, TokenError):
        return None  # the last two: numpy reads headers as Python


def save_arrays(folder: Path, arrays: Arrays, report: dict[str, Any]) -> None:
    """Write a folder in one step: another run sees all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    _remove_leftovers(folder.parent)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        about = {"report": report, "shapes": _shapes(arrays), "checksums": _checksums(arrays)}
        files: dict[str, Any] = {f"{name}.npy": array for name, array in arrays.items()}
        for name, content in {**files, "about.json": json.dumps(about).encode()}.items():
            with (temporary / name).open("wb") as file:
                file.write(content) if isinstance(content, bytes) else np.save(file, content)
                file.flush()
                os.fsync(file.fileno())  # the rename must not reach the disk before the data
        try:
            os.rename(temporary, folder)
        except OSError:
            if load_arrays(folder, verify=True):  # another run was faster
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(cache_dir: Path) -> None:
    """Delete what runs that were killed while writing have left, once it is a day old.

    By our own pattern of names alone: the user may have other things in this folder.
    """
    for leftover in cache_dir.glob(".*/"):
        ours = re.fullmatch(r"\.[0-9a-f]{32}\.[0-9a-f]{32}", leftover.name)
        if ours and time.time() - leftover.stat().st_mtime > 86400:
            shutil.rmtree(leftover, ignore_errors=True)


def share_arrays(arrays: Arrays, folder: Path | None) -> Arrays:
    """Rank 0's arrays on every rank.  # collective: all ranks

    Args:
        arrays: used on rank 0 only.
        folder: where rank 0 has saved them, if it has. Mapped, so that the ranks of a node share
            memory, if every rank can see it (nodes may not share a file system); else sent.
    """
    loaded = load_arrays(folder) if folder else None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loaded[0] if loaded else arrays
    gathered = all_gather_objects((loaded is not None, _shapes(arrays)))
    if loaded and all(seen for seen, _ in gathered):
        return loaded[0]
    shared: Arrays = {}
    for name, (shape, dtype) in gathered[0][1].items():
        # copied: torch wants writable memory, which a mapped array is not
        array = np.array(arrays[name]) if dist.get_rank() == 0 else np.empty(shape, dtype)
        # as bytes, in pieces: gloo knows no bool and counts in 32 bits
        for piece in torch.from_numpy(array).view(torch.uint8).split(2**30):
            dist.broadcast(piece, src=0)
        shared[name] = array
    return shared


def _checksums(arrays: Arrays) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in arrays.items()}


def _shapes(arrays: Arrays) -> dict[str, Any]:
    return {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}
