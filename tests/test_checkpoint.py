"""Checkpoints: a run that goes on from one is bit by bit the run that was never interrupted."""

import math
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common.checkpoint import Models, load_checkpoint, save_checkpoint
from common.dist import DistEnv
from common.logprobs import compute_logprobs, compute_values
from common.lora import LoraSettings
from common.model import load_model
from tests import test_model
from tests.launch import environment
from tests.test_scores import ROOT, SETTINGS, WEIGHTS, tiny, value_row
from tests.tiny import full, local

env = test_model.env  # the fixture

EXTRA = {"step": 7, "kl_coef": 0.1 + 0.2, "prompts": [3, 1, 2], "best": None}
BETAS = (0.8, 0.95)


def build(
    path: str, env: DistEnv, lora: LoraSettings | None = None, **settings: Any
) -> dict[str, Any]:
    """A policy and a critic with the optimizers of the scripts."""
    models = {}
    for name, head in (("policy", "lm"), ("critic", "score")):
        settings = {"dtype": torch.float32, "head": head, "new_head": "zero"} | settings
        model = load_model(path, env, lora=lora, seed=5, **settings | {"head": head})
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        models[name] = (model, torch.optim.AdamW(groups, lr=1e-2, betas=BETAS, fused=True))
    return models


def train(
    models: Models, steps: Iterable[int], names: Iterable[str] = ("critic", "policy")
) -> None:
    """Every rank on sequences of its own. The critic's first parameter never has a gradient."""
    rank = torch.distributed.get_rank()
    for step in steps:
        row = value_row([(step + rank) % 6, (step + rank + 3) % 6, 4])
        weights = row.expand(WEIGHTS)
        for name in names:
            model, optimizer = models[name]
            if name == "policy":
                (-compute_logprobs(model, row)[0] * weights / 70).sum().backward()
            else:
                errors = compute_values(model, row) - weights
                torch.where(row.response_mask, errors / 70, 0.0).square().sum().backward()
                optimizer.param_groups[0]["params"][0].grad = None
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def outputs(models: Models) -> list[Tensor]:
    """Forwards, which under FSDP leave full copies of the parameters behind."""
    row = value_row()
    return [compute_logprobs(models["policy"][0], row)[0], compute_values(models["critic"][0], row)]


def snapshot(models: Models) -> dict[str, Any]:
    """What must come back; called after a step, a save or a load, when there are shards alone."""
    result: dict[str, Any] = {}
    for name, (model, optimizer) in models.items():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for key, parameter in model.named_parameters():
            result[f"{name} {key}"] = full(parameter.detach()).clone()
            for entry, tensor in optimizer.state.get(parameter, {}).items():
                assert entry != "step" or tensor.shape == ()
                result[f"{name} {key} {entry}"] = full(tensor).clone()
        result[f"{name} groups"] = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
    return result


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert first.keys() == second.keys()
    for key, value in first.items():
        same = (
            torch.equal(value, second[key]) if isinstance(value, Tensor) else value == second[key]
        )
        assert same, key
    return True


def saved_names(path: Path) -> set[str]:
    return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def check_continuation(new: Callable[[], dict[str, Any]], path: Path) -> None:
    """Rolled back or started anew, a run goes on as it did: from a warm-up of the critic, in which
    the policy's optimizer has no state, and from a state of both. Then both checkpoints are there.
    """
    models = new()
    storage = [local(p).data_ptr() for model, _ in models.values() for p in model.parameters()]
    for start, names in ((0, ["critic"]), (4, ["critic", "policy"])):
        train(models, range(start, start + 2), names)
        assert bool(models["policy"][1].state) == (start > 0)
        expected_outputs = outputs(models)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # DCP has several
            save_checkpoint(path, models, EXTRA)
        before = snapshot(models)
        train(models, range(start + 2, start + 4))
        after = snapshot(models)
        for continued in (models, new()) if start else (models,):
            for _, optimizer in continued.values():
                for group in optimizer.param_groups:
                    group |= {"lr": 0.5, "betas": (0.1, 0.2), "weight_decay": 1.0}
            outputs(continued)
            compute_values(continued["critic"][0], value_row()).sum().backward()  # never to be used
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert load_checkpoint(path, continued) == EXTRA
            assert all(
                torch.equal(*pair)
                for pair in zip(outputs(continued), expected_outputs, strict=True)
            )
            for _, optimizer in continued.values():
                for group in optimizer.param_groups:
                    assert group["lr"] == 0.5  # the scheduler's
                    group["lr"] = 1e-2
            assert equal(snapshot(continued), before)
            train(continued, range(start + 2, start + 4))
            assert equal(snapshot(continued), after)
    kept = [local(p).data_ptr() for model, _ in models.values() for p in model.parameters()]
    assert kept == storage


@pytest.mark.parametrize(
    "name, lora, settings",
    [
        ("qwen3", None, {}),  # tied
        ("qwen3-untied", None, {"dtype": torch.bfloat16}),
        ("gpt2", SETTINGS, {"cpu_offload": True, "activation_checkpointing": True}),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(
    name: str, lora: LoraSettings | None, settings: dict[str, Any], tmp_path: Path, env: DistEnv
) -> None:
    """Resume and rollback; the optimizer of a policy in its critic's warm-up got a first step."""
    path = tiny(tmp_path / "model", name)
    checkpoint = tmp_path / "checkpoints" / "step_3"
    check_continuation(lambda: build(path, env, lora, **settings), checkpoint)
    assert [file.name for file in checkpoint.parent.iterdir()] == ["step_3"]
    # What is frozen is not written, what is tied is written once, and what has no state has none.
    models = build(path, env, lora)
    trained = {
        f"{name}/parameters/{n}"
        for name, (model, _) in models.items()
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    names = saved_names(checkpoint)
    assert {key for key in names if "/parameters/" in key} == trained
    assert len(names) == len(trained) * 4 - 3


def test_ranks(tmp_path: Path, env: DistEnv) -> None:
    """Two ranks read what one has written and the other way round; see run_checkpoint.py."""
    # rows that do not divide
    path = tiny(tmp_path / "model", vocab_size=323, num_hidden_layers=1)
    models = build(path, env)
    train(models, range(2))
    save_checkpoint(tmp_path / "one", models, EXTRA)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "tests" / "run_checkpoint.py")]
    answer = subprocess.run(
        [*command, str(tmp_path), path],
        env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    before = snapshot(models)
    extra, of_two_ranks = torch.load(tmp_path / "two.pt")
    assert extra == EXTRA and equal(of_two_ranks, before)
    train(models, range(2))
    assert load_checkpoint(tmp_path / "main", models) == EXTRA | {"rank": 0}
    assert equal(snapshot(models), before)


def small(folder: Path, env: DistEnv, **settings: Any) -> dict[str, Any]:
    path = tiny(folder, num_hidden_layers=1)
    return build(path, env, **{"lora": SETTINGS} | settings)


@pytest.mark.parametrize("step", ["write_data", "finish"])
def test_a_failed_save_leaves_the_checkpoint_before_it(
    step: str, tmp_path: Path, env: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P68: the only checkpoint was overwritten by half of another."""
    models = small(tmp_path / "model", env)
    path = tmp_path / "run" / "step_1"
    save_checkpoint(path, models, EXTRA)
    before = snapshot(models)
    train(models, range(2))

    def fail(*arguments: object, **settings: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, step, fail)
        for target in (path, tmp_path / "run" / "step_2"):
            with pytest.raises(RuntimeError, match=f"could not write {target}: .*no space left"):
                save_checkpoint(target, models, EXTRA)
    assert not (tmp_path / "run" / "step_2").exists()
    assert load_checkpoint(path, models) == EXTRA
    assert equal(snapshot(models), before)
    # The next save does not stumble over what is left, and takes nothing of it along.
    (tmp_path / "run" / "step_1.partial" / "junk").write_text("")
    shutil.copytree(path, tmp_path / "run" / "step_1.replaced")
    save_checkpoint(path, models, {"step": 8})
    assert load_checkpoint(path, models) == {"step": 8}
    assert not (path / "junk").exists()
    assert sorted(file.name for file in path.parent.iterdir()) == ["step_1", "step_2.partial"]

    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="could not write .*file/step_1: "):
        save_checkpoint(tmp_path / "file" / "step_1", models, EXTRA)


def test_what_is_no_checkpoint_of_these_models_is_refused(tmp_path: Path, env: DistEnv) -> None:
    """Nothing has changed by then."""
    models = small(tmp_path / "model", env)
    path = tmp_path / "step_1"
    save_checkpoint(path, models, EXTRA)
    train(models, range(2))
    before = snapshot(models)

    def refused(where: Path, message: str, others: Models = models) -> None:
        with pytest.raises(ValueError) as caught:
            load_checkpoint(where, others)
        assert str(where) in str(caught.value) and message in str(caught.value)

    for missing in (tmp_path / "nowhere", tmp_path / "model", tmp_path):
        refused(missing, "is no checkpoint")
    for file in ("extra.json", "optimizers.json", ".metadata"):
        for size in (None, 0, 20):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            content = (copy / file).read_bytes()
            (copy / file).unlink() if size is None else (copy / file).write_bytes(content[:size])
            refused(copy, "is no checkpoint")

    refused(path, "critic/parameters/", {"policy": models["policy"]})
    refused(path, "third/parameters/", models | {"third": models["policy"]})
    refused(path, "parameters/", {"policy": models["critic"], "critic": models["policy"]})
    for lora in (LoraSettings(2, 7), LoraSettings(3, 7, ("q_proj",)), None):
        refused(path, "critic/parameters/model.", small(tmp_path / "other", env, lora=lora))
    wide = build(tiny(tmp_path / "wide", intermediate_size=96, num_hidden_layers=1), env, SETTINGS)
    refused(path, "is (3, 128) torch.float32, here (3, 96) torch.float32", wide)
    trained = [p for p in models["critic"][0].parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained[::-1])
    refused(path, "critic has", models | {"critic": (models["critic"][0], optimizer)})
    assert equal(snapshot(models), before)

    (data,) = copy.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:2000])
    shutil.copy(path / ".metadata", copy)
    refused(copy, "cannot be read")


def test_extra_comes_back_as_it_was(tmp_path: Path, env: DistEnv) -> None:
    models = {"policy": small(tmp_path / "model", env)["policy"]}
    extra = {
        "floats": [0.1 + 0.2, 1e-320, 1.7976931348623157e308, -0.0, math.inf, -math.inf],
        "nan": math.nan,
        "big": 2**80,
        "nested": {"a": [{"b": None}, True, ""]},
        "text": "é\n\udcff\u2028",
    }
    save_checkpoint(tmp_path / "step_1", models, extra)
    assert repr(load_checkpoint(tmp_path / "step_1", models)) == repr(extra)
    for wrong in ((1, 2), {1: 2}, {1}, torch.ones(1), tmp_path):
        with pytest.raises(ValueError, match="extra "):
            save_checkpoint(tmp_path / "step_1", models, {"fine": 1, "wrong": [wrong]})
    assert load_checkpoint(tmp_path / "step_1", models)["big"] == 2**80
