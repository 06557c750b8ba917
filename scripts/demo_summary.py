"""The end of demo.sh and pipeline.sh: what the runs reached, as a table and as `summary.json`.

Exit code 1 when the improvement is not plain: something is broken then, and the demo must say so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from plot import read_metrics, series
from rich import box
from rich.console import Console
from rich.table import Table

MIN_GAIN, MIN_ACCURACY = 0.25, 0.8
TRAINED_ON = "eval/accuracy"
"""held-out accuracy by the rewards of training; another metric has been hidden from training"""


def before_after(run: Path, metric: str) -> tuple[float, float]:
    """A metric of the held-out data before the first update and after the last one.

    Raises:
        ValueError: the run was not evaluated at both ends.
    """
    rows = read_metrics(run)
    steps, values = series(rows, metric)
    if len(steps) < 2 or steps[0] != 0 or steps[-1] != rows[-1]["step"]:
        raise ValueError(f"{run}/metrics.jsonl: no {metric} at step 0 and at the last step")
    return values[0], values[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the runs and learning_curve.png")
    parser.add_argument("--run", required=True, help="folder of the RL run in it")
    parser.add_argument(
        "--metric", default=TRAINED_ON, help="of the RL run: the accuracy to report"
    )
    parser.add_argument("--reward_model", default=None, help="folder of the reward model's run")
    parser.add_argument("--seconds", nargs="+", required=True, metavar="NAME=SECONDS")
    args = parser.parse_args()
    run: Path = args.folder / args.run
    seconds = {name: int(value) for name, _, value in (s.partition("=") for s in args.seconds)}
    before, after = before_after(run, args.metric)
    summary: dict[str, Any] = {
        "accuracy_before": before,
        "accuracy_after": after,
        "seconds_training": sum(seconds.values()),
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "checkpoint": str(run / "final"),
        "metrics": str(run / "metrics.jsonl"),
        "learning_curve": str(args.folder / "learning_curve.png"),
    }

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    accuracy = "accuracy" if args.metric == TRAINED_ON else "hidden accuracy"
    table.add_row(f"{accuracy} after imitation (SFT)", f"{before:.3f}")
    table.add_row(f"{accuracy} after RL ({args.run.upper()})", f"[bold green]{after:.3f}[/]")
    if args.reward_model is not None:
        _, judge = before_after(args.folder / args.reward_model, "eval/accuracy")
        summary["reward_model_accuracy"] = judge
        table.add_row("reward model, held-out pairs", f"{judge:.3f} in the right order")
    _, kl = series(read_metrics(run), "policy/kl_response")
    if kl:
        summary["largest_kl_response"] = max(kl)
        settings = json.loads((run / "args.json").read_text(encoding="utf-8"))
        summary["kl_target"] = settings["kl_controller_target"]
        table.add_row(
            "largest KL to the imitation",
            f"{max(kl):.2f} nats per response (target {summary['kl_target']:g})",
        )
    times = ", ".join(f"{name.upper()} {value} s" for name, value in seconds.items())
    table.add_row("time, start-up included", times)
    table.add_row("checkpoint", summary["checkpoint"])
    table.add_row("metrics", summary["metrics"])
    table.add_row("sampled answers", str(run / "rollouts"))
    table.add_row("learning curve", summary["learning_curve"])
    path = args.folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table.add_row("this table", str(path))
    Console(highlight=False).print(table)
    if after - before < MIN_GAIN or after < MIN_ACCURACY:
        print(
            f"error: {accuracy} {before:.3f} -> {after:.3f}, but this demo should gain at least "
            f"{MIN_GAIN} and reach {MIN_ACCURACY}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
