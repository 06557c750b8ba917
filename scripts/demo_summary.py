"""The end of scripts/demo.sh: what the run reached, as a table and as `summary.json`.

Exit code 1 when the improvement is not plain: something is broken then, and the demo must say so.
"""

import argparse
import json
import sys
from pathlib import Path

from plot import read_metrics, series
from rich import box
from rich.console import Console
from rich.table import Table

MIN_GAIN, MIN_ACCURACY = 0.25, 0.8


def accuracy_before_after(run: Path) -> tuple[float, float]:
    """Held-out accuracy before the first update and after the last one.

    Raises:
        ValueError: the run was not evaluated at both ends.
    """
    rows = read_metrics(run)
    steps, values = series(rows, "eval/accuracy")
    if len(steps) < 2 or steps[0] != 0 or steps[-1] != rows[-1]["step"]:
        raise ValueError(f"{run}/metrics.jsonl: no eval/accuracy at step 0 and at the last step")
    return values[0], values[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo_dir", type=Path, help="holds sft/, grpo/ and learning_curve.png")
    parser.add_argument("--seconds_sft", type=int, required=True)
    parser.add_argument("--seconds_grpo", type=int, required=True)
    args = parser.parse_args()
    grpo = args.demo_dir / "grpo"
    before, after = accuracy_before_after(grpo)
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "seconds_training": args.seconds_sft + args.seconds_grpo,
        "seconds_sft": args.seconds_sft,
        "seconds_grpo": args.seconds_grpo,
        "checkpoint": str(grpo / "final"),
        "metrics": str(grpo / "metrics.jsonl"),
        "learning_curve": str(args.demo_dir / "learning_curve.png"),
    }
    path = args.demo_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("accuracy after imitation (SFT)", f"{before:.3f}")
    table.add_row("accuracy after RL (GRPO)", f"[bold green]{after:.3f}[/]")
    table.add_row(
        "time, start-up included", f"SFT {args.seconds_sft} s, GRPO {args.seconds_grpo} s"
    )
    table.add_row("checkpoint", summary["checkpoint"])
    table.add_row("metrics", summary["metrics"])
    table.add_row("sampled answers", str(grpo / "rollouts"))
    table.add_row("learning curve", summary["learning_curve"])
    table.add_row("this table", str(path))
    Console(highlight=False).print(table)
    if after - before < MIN_GAIN or after < MIN_ACCURACY:
        print(
            f"error: accuracy {before:.3f} -> {after:.3f}, but this demo should gain at least "
            f"{MIN_GAIN} and reach {MIN_ACCURACY}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
