"""Launched by test_data.py: rank 0 loads, all ranks get the same; errors reach all of them."""

import common  # noqa: F401  isort: skip  (sets the environment for torch)

import hashlib
import os
import sys
import time
from pathlib import Path

from tiny import make_tokenizer

from common import cache, dist
from common.data import load_sft_rows
from common.pairs import load_pairs

env = dist.setup(timeout_s=3)
folder = Path(sys.argv[1])

if "pairs" in sys.argv:
    digests = set()
    for cache_dir in (None, folder / "cache", folder / "cache"):
        loaded, report = load_pairs(
            [str(folder / "a.jsonl")],
            make_tokenizer(),
            max_tokens=100,
            for_scoring=True,
            cache_dir=cache_dir,
        )
        everything = (loaded[:], loaded.keys.tolist(), loaded.margins.tolist(), report.rows)
        everything += (loaded.response_lengths.tolist(), loaded.source_sizes, report.checks)
        digests.add(hashlib.sha256(repr(everything).encode()).hexdigest())
    assert bool(report.from_cache)
    print(f"rank {env.rank}: {digests.pop()} {len(loaded)} pairs", flush=True)
    assert not digests
    dist.shutdown()
    sys.exit()


def slow() -> str:
    time.sleep(6)  # longer than a collective may take
    return f"from rank {env.rank}"


assert dist.from_rank0(slow) == "from rank 0"

options = {"max_tokens": 100}
digests = set()
for kind in ("sent", "written", "mapped", "out of sight"):
    if kind == "out of sight" and env.rank == 1:  # a node that does not share the file system
        cache.load_arrays = lambda folder: None
    options["cache_dir"] = None if kind == "sent" else folder / "cache"
    dataset, report = load_sft_rows([str(folder / "a.jsonl")], make_tokenizer(), **options)
    assert bool(report.from_cache) == (kind in ("mapped", "out of sight")), kind
    assert (dataset.input_ids.base is None) == (kind in ("sent", "out of sight")), kind
    everything = (dataset[:], dataset.num_targets.tolist(), dataset.source_sizes)
    everything += (dataset.lengths.tolist(), dataset.largest_id, str(report).partition(",")[0])
    digests.add(hashlib.sha256(repr(everything).encode()).hexdigest())
assert len(digests) == 1

try:
    load_sft_rows([str(folder / "missing.jsonl")], make_tokenizer(), max_tokens=100)
except ValueError as error:
    print(f"rank {env.rank}: {digests.pop()} {len(dataset)} {error}", flush=True)


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"odd {a + b}")


def fail() -> None:
    raise Odd(1, 2)


try:
    dist.from_rank0(fail)
except (Odd, RuntimeError) as error:
    assert "odd 3" in str(error) and os.environ["RANK"] == str(env.rank)
dist.shutdown()
