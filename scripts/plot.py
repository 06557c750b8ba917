"""Learning curves of one or several runs as a PNG.

    python scripts/plot.py runs/demo/grpo
    python scripts/plot.py runs/a runs/b --output comparison.png
    python scripts/plot.py runs/pipeline/ppo --metrics eval/reward/exact policy/kl_response

Reads `metrics.jsonl` of each run folder, also of one that is still running. A panel appears when
at least one run has its metric; the faint line is the metric, the strong one its running mean.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt

COLORS = ("#3366cc", "#e07b39", "#2a9d5c", "#b5446e", "#7a5cc7", "#8c6d3f", "#4c4c4c", "#1aa5b8")
INK, FAINT = "#333333", "#d9d9d9"


@dataclass(frozen=True)
class Panel:
    """One diagram: a metric of every step, an evaluation metric, or both."""

    title: str
    train: str | None
    evaluation: str | None
    bounds: tuple[float, float] | None = None


PANELS = (
    Panel("reward (training samples)", "rollout/reward", None),
    Panel("accuracy (held-out problems)", None, "eval/accuracy", (0.0, 1.0)),
    Panel("loss", "policy/loss", "eval/loss"),
)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of `run/metrics.jsonl`; a last line that is still being written is left out.

    Raises:
        ValueError: no such file, or it has no complete row.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {run} is not the --output_dir of a run")
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines[:-1] if line]
    if not rows:
        raise ValueError(f"{path} has no complete row yet")
    return rows


def series(rows: list[dict[str, Any]], name: str | None) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the rows where it is absent or was not finite."""
    points = [(row["step"], row[name]) for row in rows if name and row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: list[float]) -> list[float]:
    """Mean over a centred window of a tenth of the series, narrower at the ends."""
    half = len(values) // 20
    means: list[float] = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def panels_of(names: list[str]) -> tuple[Panel, ...]:
    """A panel for each metric, with its name as title."""
    return tuple(
        Panel(name, None, name) if name.startswith("eval/") else Panel(name, name, None)
        for name in names
    )


def plot(runs: list[Path], output: Path, choice: tuple[Panel, ...] = PANELS) -> None:
    """Draw those panels of the choice that these runs have metrics for.

    Raises:
        ValueError: a run without metrics, or none of the panels' metrics in any run.
    """
    metrics = {run: read_metrics(run) for run in runs}
    for rows in metrics.values():
        if choice is PANELS and series(rows, "rollout/reward")[0]:
            for row in rows:
                row.pop("policy/loss", None)  # of a policy gradient: no measure of progress

    def has(name: str | None) -> bool:
        return any(series(rows, name)[0] for rows in metrics.values())

    panels = [panel for panel in choice if has(panel.train) or has(panel.evaluation)]
    if not panels:
        names = ", ".join(name for p in choice for name in (p.train, p.evaluation) if name)
        raise ValueError(f"none of {names} is in {', '.join(map(str, runs))}")

    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    labels = dict(zip(runs, short_names(runs), strict=True))
    for ax, panel in zip(axes[0], panels, strict=True):
        for i, (run, rows) in enumerate(metrics.items()):
            color = COLORS[i % len(COLORS)]
            label = labels[run] if len(runs) > 1 else "training"
            steps, values = series(rows, panel.train)
            if steps:
                ax.plot(steps, values, color=color, alpha=0.25, linewidth=1)
                ax.plot(steps, running_mean(values), color=color, linewidth=2, label=label)
                label = f"{label}, held-out" if len(runs) > 1 else "held-out"
            steps, values = series(rows, panel.evaluation)
            if steps:
                style = "--" if panel.train else "-"
                ax.plot(steps, values, style, color=color, marker="o", markersize=4, label=label)
                if len(runs) == 1 and (panel.bounds or choice is not PANELS):
                    annotate_ends(ax, steps, values)
        decorate(ax, panel, legend=len(runs) > 1 or (has(panel.train) and has(panel.evaluation)))
    if len(runs) == 1:
        figure.suptitle(str(runs[0]), color=INK, fontsize=11)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def short_names(runs: list[Path]) -> list[str]:
    """Folder names, or whole paths where the names alone would be the same."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def annotate_ends(ax: Any, steps: list[int], values: list[float]) -> None:
    """Write the first and the last value beside their points."""
    for i, align, offset in ((0, "left", (8, -4)), (-1, "right", (0, -15))):
        ax.annotate(
            f"{values[i]:.2f}",
            (steps[i], values[i]),
            xytext=offset,
            textcoords="offset points",
            ha=align,
            color=INK,
        )


def decorate(ax: Any, panel: Panel, *, legend: bool) -> None:
    """Titles, limits, a light grid; no box around the diagram."""
    ax.set_title(panel.title, loc="left", color=INK, fontsize=11)
    ax.set_xlabel("step", color=INK)
    ax.grid(True, color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=INK, length=0)
    ax.margins(x=0.04)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if panel.bounds:
        low, high = panel.bounds
        ax.set_ylim(low - 0.03, high + 0.03)
    if legend:
        ax.legend(frameon=False, fontsize=9, labelcolor=INK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="--output_dir of a run")
    parser.add_argument(
        "--output", type=Path, default=None, help="default: learning_curve.png in the first run"
    )
    parser.add_argument(
        "--metrics", nargs="+", default=None, metavar="NAME", help="these instead of the usual ones"
    )
    args = parser.parse_args()
    choice = PANELS if args.metrics is None else panels_of(args.metrics)
    output = args.output or args.runs[0] / "learning_curve.png"
    try:
        plot(list(dict.fromkeys(args.runs)), output, choice)
    except ValueError as error:
        parser.error(str(error))
    print(output)


if __name__ == "__main__":
    main()
