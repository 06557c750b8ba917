"""One metrics dict per step -> console, `metrics.jsonl`, wandb; its failures end no run."""

import atexit
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_RESULTS = ("rollouts", "final", "adapter", "critic", "checkpoints")
"""what a run deletes of the one that it overwrites"""
_locks: dict[Path, IO[str]] = {}  # held until the process ends


def prepare_output_dir(output_dir: str, *, overwrite: bool, inputs: Sequence[str]) -> Path:
    """The run's folder, checked before anything expensive starts; call it on every rank.

    Args:
        output_dir: created if missing.
        overwrite: allow it to hold a run.
        inputs: models, rewards and data that the run reads, as on the command line.

    Raises:
        ValueError: it holds a run already and `overwrite` is off, another process is writing there,
            it cannot be written, or one of the `inputs` would be deleted with the old run.
    """
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir={output_dir} is a file")
    metrics = path / "metrics.jsonl"  # empty: a run that failed before its first step
    if metrics.exists() and metrics.stat().st_size > 0 and not overwrite:
        raise ValueError(
            f"--output_dir={output_dir} holds a run already; "
            "choose another or pass --overwrite True"
        )
    for name in inputs:
        homes = [(path / result).resolve() for result in _RESULTS]
        whole = name.removeprefix("model:")
        for part in (whole, whole.partition("[")[0]):  # a[1] may be a folder, or a slice of a
            source = Path(part).expanduser()
            if source.exists() and any(source.resolve().is_relative_to(home) for home in homes):
                raise ValueError(f"--output_dir={output_dir} would overwrite {name}, which is read")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0" and path.resolve() not in _locks:
            lock = (path / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks[path.resolve()] = lock
    except BlockingIOError as error:
        raise ValueError(f"--output_dir={output_dir}: another run is writing there") from error
    except OSError as error:
        raise ValueError(f"--output_dir={output_dir} cannot be written: {error}") from error
    return path


class Tracker:
    """Writes a run's metrics. On ranks other than 0 every method does nothing.

    Args:
        output_dir: gets `args.json`, `metrics.jsonl` and `rollouts/`.
        settings: the run's flags and facts, written to `args.json` and to wandb.
        total_steps: for the progress display.
        columns: console label -> metric name, in order.
        wandb_project, wandb_name: None for the project switches wandb off.
        source: the script, uploaded to wandb with the run.
    """

    def __init__(
        self,
        output_dir: Path,
        settings: Mapping[str, Any],
        *,
        enabled: bool,
        total_steps: int,
        columns: Mapping[str, str],
        wandb_project: str | None,
        wandb_name: str | None,
        source: str,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        self._dir = output_dir
        self._columns = columns
        self._total_steps = total_steps
        settings = {**settings, "git_sha": _git_sha(Path(source).parent)}
        # Nothing of an overwritten run may look like a result of this one.
        for stale in _RESULTS:
            shutil.rmtree(output_dir / stale, ignore_errors=True)
        (output_dir / "args.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")
        self._file = (output_dir / "metrics.jsonl").open("w", encoding="utf-8")
        self._wandb = _start_wandb(wandb_project, wandb_name, settings, output_dir, source)
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._progress.start()
        atexit.register(self._progress.stop)  # a crash must not leave the cursor hidden

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show what the run is doing now (`rollout 37/256`)."""
        if self._enabled:
            count = "" if done is None else f" {done}/{total}"
            self._progress.update(self._task, description=f"{name}{count}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics, already reduced over ranks; non-finite values become null."""
        if not self._enabled:
            return
        row = {
            "step": step,
            **{k: (float(v) if math.isfinite(v) else None) for k, v in metrics.items()},
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._progress.update(self._task, completed=step)
        if self._wandb is not None:
            try:
                self._wandb.log(dict(metrics), step=step)
            except Exception as error:  # noqa: BLE001  whatever a tracker raises, training goes on
                print(f"wandb stopped: {error}", file=sys.stderr)
                self._wandb = None
        evaluated = any(name.startswith("eval/") for name in metrics)
        if step > 3 and step % max(1, self._total_steps // 20) and not evaluated:
            return  # about twenty lines a run; metrics.jsonl has them all
        cells = [
            f"{label} {_short(metrics[name])}"
            for label, name in self._columns.items()
            if name in metrics
        ]
        self._console.print(
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  {'  '.join(cells)}",
            highlight=False,
            soft_wrap=True,
        )

    def dump_samples(self, name: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write `rollouts/<name>.jsonl`, one sample a line."""
        if not self._enabled:
            return
        path = self._dir / "rollouts" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for sample in samples:
                # surrogateescape bytes of broken UTF-8 cannot be written as they are
                file.write(json.dumps(sample, default=str) + "\n")

    def finish(self) -> None:
        """Close everything; the progress display disappears."""
        if not self._enabled:
            return
        self._progress.stop()
        self._file.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:  # noqa: BLE001  as above
                print(f"wandb could not finish: {error}", file=sys.stderr)


def _start_wandb(
    project: str | None, name: str | None, settings: Mapping[str, Any], path: Path, source: str
) -> Any:
    """A wandb run, or None when it is off or does not start within a minute."""
    if project is None:
        return None
    try:
        import wandb

        run = wandb.init(
            project=project,
            name=name,
            config=dict(settings),
            dir=str(path),
            settings=wandb.Settings(init_timeout=60, console="off", silent=True),
        )
        run.log_code(
            str(Path(source).parent),
            include_fn=lambda file: file == str(Path(source)) or "/common/" in file,
        )
        return run
    except Exception as error:  # noqa: BLE001  a tracker must not stop training
        print(f"wandb is off: {error}", file=sys.stderr)
        return None


def _git_sha(folder: Path) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _short(value: float) -> str:
    """Three or four significant digits, at a fixed width where that is possible."""
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
