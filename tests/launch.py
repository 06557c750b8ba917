"""Start the scripts as users do, and read what they leave behind."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tiny import make_tiny_model

ROOT = Path(__file__).parent.parent
# A server that has imported what the scripts import, and has started no thread, forks their runs.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["dpo", "grpo", "ppo", "reward_model", "sft"])


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


def run_forked(
    script: str, *flags: object, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Like `run` with one rank and no launcher, without the seconds that imports take."""
    line = [str(ROOT / script), *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_run_script, args=(line, outputs))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(line, timeout, *(Path(o).read_text() for o in outputs))
        assert process.exitcode is not None
        texts = [Path(output).read_text() for output in outputs]
    return subprocess.CompletedProcess(line, process.exitcode, *texts)


def launch(
    script: str, *flags: object, ranks: int | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run to the end: forked, or by torchrun if a number of ranks is given."""
    if ranks is None:
        return run_forked(script, *flags, timeout=timeout)
    return run(script, *flags, ranks=ranks, timeout=timeout)


def _run_script(line: list[str], outputs: list[str]) -> None:
    """What `python script flags` does, in a process of its own; ends it."""
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir("/")
    sys.argv = line
    code = 0
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001  as Python itself does at the top
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
