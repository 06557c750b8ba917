"""Metrics reach their files, and no tracker can stop or fail a run."""

import fcntl
import json
import math
import sys
import types
from pathlib import Path

import pytest

from common.tracking import Tracker, prepare_output_dir


def make(path: Path, **overrides: object) -> Tracker:
    settings: dict = {
        "enabled": True,
        "total_steps": 100,
        "columns": {"loss": "policy/loss"},
        "wandb_project": None,
        "wandb_name": None,
        "source": __file__,
    }
    return Tracker(path, {"learning_rate": 1e-6}, **settings | overrides)


def test_every_step_is_a_json_line_and_nan_is_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(tmp_path)
    for step in range(1, 101):
        tracker.log(step, {"policy/loss": math.nan if step == 7 else 0.5 / step})
    tracker.dump_samples("step_1", [{"response": "\udcff\x00é", "score": None}])
    tracker.finish()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert rows[6]["policy/loss"] is None
    assert json.loads((tmp_path / "args.json").read_text())["learning_rate"] == 1e-6
    assert (tmp_path / "rollouts" / "step_1.jsonl").read_text().count("\n") == 1
    printed = capsys.readouterr().out.splitlines()
    assert 15 < len(printed) < 30  # a line per step would bury everything else


def test_nothing_of_an_overwritten_run_is_left(tmp_path: Path) -> None:
    """Adapters of an earlier LoRA run lay beside the new model as if they were its own."""
    for folder in ("rollouts", "final", "adapter", "critic", "checkpoints"):
        (tmp_path / folder).mkdir()
    make(tmp_path).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args.json", "metrics.jsonl"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    """P69: all ranks wrote the same files."""
    tracker = make(tmp_path, enabled=False)
    tracker.phase("rollout", 1, 2)
    tracker.log(1, {"policy/loss": 1.0})
    tracker.dump_samples("step_1", [{}])
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_wandb_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """P77: a network failure in the tracker ended the run."""

    class Run:
        def log(self, metrics: dict, step: int) -> None:
            if broken == "log":
                raise ConnectionError("no network")

        def finish(self) -> None:
            if broken == "finish":
                raise ConnectionError("no network")

        def log_code(self, *args: object, **kwargs: object) -> None: ...

    def init(**kwargs: object) -> Run:
        if broken == "init":
            raise TimeoutError("no network")
        return Run()

    stub = types.SimpleNamespace(init=init, Settings=lambda **kwargs: None)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    tracker = make(tmp_path, wandb_project="p")
    tracker.log(1, {"policy/loss": 1.0})
    tracker.log(2, {"policy/loss": 1.0})
    tracker.finish()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_output_dir_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="--output_dir="):
            prepare_output_dir(str(path), overwrite=False, inputs=["m"])
    run = prepare_output_dir(str(tmp_path / "run"), overwrite=False, inputs=["m"])
    (run / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="--overwrite"):
        prepare_output_dir(str(run), overwrite=False, inputs=["m"])
    assert prepare_output_dir(str(run), overwrite=True, inputs=["m"]) == run


def test_what_a_run_reads_is_not_deleted(tmp_path: Path) -> None:
    """A reference model, a reward model and rollouts of the overwritten run were deleted first."""
    (tmp_path / "final").mkdir()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text("{}")
    (tmp_path / "final" / "of[1]").mkdir()
    for name in ("final", "final/of[1]", "rollouts/step_1.jsonl[:90%]"):
        for prefix in ("", "model:"):
            with pytest.raises(ValueError, match="would overwrite"):
                inputs = ["hub/name", f"{prefix}{tmp_path}/{name}"]
                prepare_output_dir(str(tmp_path), overwrite=True, inputs=inputs)


def test_two_jobs_cannot_share_a_folder(tmp_path: Path) -> None:
    """Both ended with code 0, their files mixed."""
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is writing there"):
            prepare_output_dir(str(tmp_path), overwrite=True, inputs=["m"])
