"""Start the scripts as users do, and read what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import make_tiny_model

ROOT = Path(__file__).parent.parent


def command(script: str, *flags: object, ranks: int | None = None) -> list[str]:
    """`python script` or, with a number of ranks, `torchrun --standalone`."""
    launcher = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / script), *map(str, flags)]


def environment() -> dict[str, str]:
    """Ours, without what an engine of another test has left there and looks like torchrun."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def run(
    script: str, *flags: object, ranks: int | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run to the end, from another folder than the repository's."""
    return subprocess.run(
        command(script, *flags, ranks=ranks),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
        env=environment(),
    )


def metrics(output_dir: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def same_every_time(row: dict[str, float]) -> dict[str, float]:
    """A row without times and memory, which no two runs share."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))}


def copy_task(folder: Path, num_rows: int = 24) -> tuple[Path, Path]:
    """A tiny model and prompts of very unequal lengths, with a reward that separates samples."""
    model = make_tiny_model(folder / "model", "qwen3", flavour="no_template")
    # One token in sixteen ends a response, so that a random model stops before the limit at times.
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(1, 320, 16))})
    )
    rows = [
        {"prompt": "hello 12 " * (1 + i % 5) + chr(97 + i % 26), "answer": chr(97 + i % 26)}
        for i in range(num_rows)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def letters(prompts, completions, answer, **columns):\n"
        "    pairs = zip(completions, answer)\n"
        "    return [sum(ord(x) for x in c) % 7 / 7 + (a in c) for c, a in pairs]\n"
    )
    return model, data
