"""Set-up, the toy task, and what the demo shows at its end."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_toy import CHARACTERS, VOCABULARY, held_out, make_toy
from scripts.plot import panels_of, plot, read_metrics, running_mean, series

ROOT = Path(__file__).parent.parent


# ---- the toy task ----

SIZES: dict[str, Any] = {"num_sft": 4000, "num_rl": 500, "num_pairs": 400, "num_eval": 200}
SIZES["mistaken"] = 0.6


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder, seed=0, **SIZES)
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_eval_problem_occurs_in_training_in_any_order(toy: Path) -> None:
    """Without the hold-out by digits, held-out accuracy came out 0.1 to 0.2 too high."""

    def keys(name: str) -> set[str]:
        return {"".join(sorted(row["prompt"])) for row in rows_of(toy / name)}

    training = keys("sft.jsonl") | keys("rl.jsonl") | keys("pairs.jsonl")
    assert not training & (keys("eval.jsonl") | keys("sft_eval.jsonl") | keys("pairs_eval.jsonl"))
    assert held_out("9141") == held_out("1149") == held_out("4191")


def test_demonstrations_are_a_mixture_and_answers_are_right(toy: Path) -> None:
    def ascending(row: dict[str, str]) -> bool:
        return row["completion"] == "".join(sorted(row["prompt"][:-1]))

    for name in ("sft.jsonl", "sft_eval.jsonl"):
        rows = rows_of(toy / name)
        assert 0.3 < sum(map(ascending, rows)) / len(rows) < 0.5
        for row in rows:
            assert ascending(row) or row["completion"] == "".join(sorted(row["prompt"][:-1]))[::-1]
    for name in ("rl.jsonl", "eval.jsonl"):
        for row in rows_of(toy / name):
            assert row["prompt"][-1] == "=" and 3 <= len(row["answer"]) <= 8
            assert row["answer"] == "".join(sorted(row["prompt"][:-1]))


def test_the_chosen_side_of_a_pair_is_the_best_answer(toy: Path) -> None:
    for name in ("pairs.jsonl", "pairs_eval.jsonl"):
        for row in rows_of(toy / name):
            assert row["chosen"] == "".join(sorted(row["prompt"][:-1])) != row["rejected"]
            assert len(row["chosen"]) == len(row["rejected"])


def test_the_same_seed_gives_the_same_bytes(toy: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        make_toy(tmp_path, seed=seed, **SIZES)
        for name in ("sft.jsonl", "eval.jsonl", "pairs.jsonl", "model/model.safetensors"):
            assert ((tmp_path / name).read_bytes() == (toy / name).read_bytes()) is same


def test_tokenizer_and_model_load_as_any_checkpoint(toy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(CHARACTERS) and VOCABULARY["<unk>"] not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == CHARACTERS
    assert tokenizer.chat_template is None
    model = AutoModelForCausalLM.from_pretrained(toy / "model")
    assert model.num_parameters() == 433_152
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


# ---- learning curve and summary ----


def write_run(folder: Path, accuracies: dict[int, float], *, steps: int = 4) -> Path:
    """A run's metrics, with a last line that is only half written."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {"rollout/reward": 0.1 * step, "policy/loss": None}
        if step in accuracies:
            row["eval/accuracy"] = accuracies[step]
        rows.append(row)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "rollout')
    return folder


def test_plot_draws_one_and_several_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {0: 0.1, 4: 0.9})
    b = write_run(tmp_path / "b", {})
    for runs in ([a], [a, b], [b]):
        plot(runs, tmp_path / "new" / "curve.png")
        assert (tmp_path / "new" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    for names in (["rollout/reward", "eval/accuracy", "no/such"], ["eval/accuracy"]):
        plot([a], tmp_path / "chosen.png", panels_of(names))
        assert (tmp_path / "chosen.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="none of no/such is in"):
        plot([a], tmp_path / "x.png", panels_of(["no/such"]))
    rows = read_metrics(a)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert series(rows, "eval/accuracy") == ([0, 4], [0.1, 0.9])
    assert series(rows, "policy/loss") == ([], [])  # null: it was not finite


def test_plot_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the --output_dir of a run"):
        plot([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(ValueError, match="no complete row"):
        plot([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 2.0}\n')
    with pytest.raises(ValueError, match="none of rollout/reward"):
        plot([tmp_path], tmp_path / "x.png")


def test_running_mean_keeps_length_and_ends() -> None:
    values = [float(i % 7) for i in range(100)]
    means = running_mean(values)
    assert len(means) == 100 and means[0] == values[0] and means[-1] == values[-1]
    assert means[50] == pytest.approx(sum(values[45:56]) / 11)


def run_summary(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/demo_summary.py"), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("accuracies", "message"),
    [
        ({0: 0.1, 4: 0.9}, None),
        ({0: 0.7, 4: 0.9}, "accuracy 0.700 -> 0.900"),
        ({0: 0.1, 4: 0.7}, "accuracy 0.100 -> 0.700"),
        ({0: 0.1, 3: 0.9}, "no eval/accuracy at step 0 and at the last step"),
    ],
)
def test_demo_fails_unless_the_improvement_is_plain(
    tmp_path: Path, accuracies: dict[int, float], message: str | None
) -> None:
    write_run(tmp_path / "grpo", accuracies)
    done = run_summary(tmp_path, "--run", "grpo", "--seconds", "sft=3", "grpo=4")
    assert (done.returncode == 0) == (message is None), done.stderr
    assert message is None or message in done.stderr
    if 4 in accuracies:
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["accuracy_before"] == accuracies[0]
        assert summary["accuracy_after"] == accuracies[4]
        assert summary["seconds_training"] == 7
        assert (summary["seconds_sft"], summary["seconds_grpo"]) == (3, 4)


def test_pipeline_reports_what_was_hidden_from_training(tmp_path: Path) -> None:
    """The score that PPO raises may look fine where the answers are not."""
    write_run(tmp_path / "rm", {0: 0.5, 4: 0.97})
    run = write_run(tmp_path / "ppo", {0: 0.1, 4: 0.9})
    (run / "args.json").write_text(json.dumps({"kl_controller_target": 1.5}))
    rows = read_metrics(run)
    rows[0]["eval/reward/exact"], rows[4]["eval/reward/exact"] = 0.1, 0.3
    for row, kl in zip(rows[1:], (0.0, 1.25, 1.0, 1.1), strict=True):
        row["policy/kl_response"] = kl
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--run", "ppo", "--reward_model", "rm", "--seconds", "sft=3", "rm=2", "ppo=4"]
    assert run_summary(tmp_path, *flags).returncode == 0  # by the reward of training
    done = run_summary(tmp_path, *flags, "--metric", "eval/reward/exact")
    assert done.returncode == 1 and "hidden accuracy 0.100 -> 0.300" in done.stderr
    assert "1.25 nats per response (target 1.5)" in done.stdout
    assert "0.970 in the right order" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.1, 0.3)
    assert (summary["largest_kl_response"], summary["kl_target"]) == (1.25, 1.5)
    assert (summary["reward_model_accuracy"], summary["seconds_training"]) == (0.97, 9)


# ---- set-up ----


def test_every_version_is_pinned_once() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = config["project"]["optional-dependencies"]
    direct = [*config["project"]["dependencies"], *extras["cpu"], *extras["gpu"], *extras["dev"]]
    assert all(line.count("==") == 1 for line in direct)
    assert list(config["tool"]["unroll"]["hashes"]) == extras["cpu"]
    lines = (ROOT / "requirements/constraints-cpu.txt").read_text().splitlines()
    indirect = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in indirect)
    names = {line.split("==")[0].split("[")[0] for line in direct}
    assert not names & {line.split("==")[0] for line in indirect}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, without a .venv, at a path with a space."""
    folder = tmp_path / "a copy"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run set-up with a pip that finds no package, so that nothing is downloaded."""
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        ["bash", str(folder / "scripts/setup.sh")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder.parent,
        env={**os.environ, "UNROLL_ACCELERATOR": "cpu", **offline, **environment},
    )


def test_setup_refuses_what_cannot_work(checkout: Path) -> None:
    done = run_setup(checkout, UNROLL_ACCELERATOR="tpu")
    assert done.returncode != 0 and "UNROLL_ACCELERATOR=tpu must be cpu or cuda" in done.stderr
    done = run_setup(checkout, UNROLL_PYTHON="/bin/false")
    assert done.returncode != 0 and "Python 3.11 to 3.14 is needed" in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_leaves_a_folder_alone_that_is_not_its_own(checkout: Path) -> None:
    precious = checkout / ".venv" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    done = run_setup(checkout)
    assert done.returncode != 0 and "move it away" in done.stderr
    assert precious.read_text() == "mine"


def test_setup_reports_a_failed_install_and_tries_again(checkout: Path, tmp_path: Path) -> None:
    """From a venv that is active and broken, with settings that would send pip elsewhere."""
    hostile = {
        "VIRTUAL_ENV": str(tmp_path / "foreign"),
        "PYTHONHOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "PIP_USER": "1",
        "PIP_TARGET": str(tmp_path / "target"),
        "UNROLL_PYTHON": sys.executable,
        "UNROLL_ACCELERATOR": "cuda",  # the CPU packages need libnuma, which may not be here
    }
    first = run_setup(checkout, **hostile)
    assert "setup: new .venv with Python 3." in first.stdout
    again = run_setup(checkout, **hostile)
    assert "setup: updating .venv" in again.stdout
    for done in (first, again):
        assert done.returncode != 0
        assert "No matching distribution found for torch==" in done.stderr
        assert "failed; the whole log is" in done.stderr
    assert not (checkout / ".venv/setup.stamp").exists()
    assert not (tmp_path / "target").exists()

    moved = checkout.rename(checkout.with_name("moved"))  # scripts in .venv/bin name the old place
    assert "setup: new .venv with Python 3." in run_setup(moved, **hostile).stdout


def test_setup_does_nothing_when_there_is_nothing_to_do() -> None:
    if not (ROOT / ".venv/setup.stamp").exists():
        pytest.skip("the .venv here was not finished by scripts/setup.sh")
    environment = {k: v for k, v in os.environ.items() if k != "UNROLL_ACCELERATOR"}
    command = ["bash", str(ROOT / "scripts/setup.sh")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, cwd="/", env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
