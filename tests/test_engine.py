"""The rollout engine: it samples what it says it does, and leaves the rest of the process alone."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import (
    BACKENDS,
    largest_gap,
    load_trainer,
    make_engine,
    make_prompts,
    next_token_logits,
    trainer_group,
)
from tiny import make_tiny_model
from transformers import AutoConfig, PreTrainedModel

from common.engine import Engine, VllmEngine
from common.weight_sync import WeightSync


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3")
    # P51: none of this may reach the sampler, and none of these ids may end a response
    hostile = dict(repetition_penalty=2.0, temperature=0.1, top_k=1, top_p=0.1, min_p=0.5)
    settings = hostile | {"do_sample": True, "eos_token_id": list(range(320))}
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def trainer(model_dir: Path) -> PreTrainedModel:
    return load_trainer(model_dir)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with trainer_group():
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, model_dir: Path, trainer: PreTrainedModel) -> Engine:
    built = make_engine(model_dir, request.param)
    WeightSync(trainer, built).sync()
    return built


def test_sampled_logprobs_are_of_the_tempered_distribution(
    engine: Engine, trainer: PreTrainedModel
) -> None:
    """P50: log-probs were the raw model's, so a trainer at temperature 0.7 saw a mismatch.

    P51: the checkpoint's generation config (penalties, top-k 1, every id an eos) had an effect.
    """
    prompts = make_prompts(3, 20, 1, 7)
    for temperature in (1.0, 0.7, 1.5):
        completions = engine.generate(
            prompts, [4, 5, 6, 7], max_tokens=16, temperature=temperature, stop_token_ids=[]
        )
        assert [len(c.response_ids) for c in completions] == [16] * 4
        assert all(c.truncated for c in completions)
        assert largest_gap(trainer, prompts, completions, temperature) < 1e-4


def test_top_p_logprobs_are_renormalised(engine: Engine, trainer: PreTrainedModel) -> None:
    prompts = make_prompts(3, 20)
    completions = engine.generate(
        prompts, [1, 2], max_tokens=12, temperature=0.8, top_p=0.6, stop_token_ids=[]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        probs = (next_token_logits(trainer, prompt, completion) / 0.8).softmax(-1)
        for row, token, logprob in zip(
            probs, completion.response_ids, completion.rollout_logprobs, strict=True
        ):
            ordered = row.sort(descending=True).values
            nucleus = int((ordered.cumsum(0) < 0.6).sum()) + 1  # the token that crosses is inside
            assert row[token] >= ordered[nucleus - 1]
            assert abs(logprob - (row[token] / ordered[:nucleus].sum()).log().item()) < 1e-4


def test_temperature_zero_is_greedy(engine: Engine, trainer: PreTrainedModel) -> None:
    prompts = make_prompts(5, 9)
    completions = engine.generate(
        prompts, [1, 2], max_tokens=10, temperature=0.0, stop_token_ids=[]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = next_token_logits(trainer, prompt, completion)
        assert completion.response_ids == logits.argmax(-1).tolist()
    assert largest_gap(trainer, prompts, completions) < 1e-4


def test_stop_token_is_part_of_the_response(engine: Engine) -> None:
    prompts = make_prompts(*range(2, 14))
    stops = list(range(0, 320, 8))
    progress: list[int] = []
    completions = engine.generate(
        prompts,
        list(range(12)),
        max_tokens=8,
        temperature=1.0,
        stop_token_ids=stops,
        on_progress=progress.append,
    )
    assert {c.truncated for c in completions} == {True, False}
    for completion in completions:
        assert completion.truncated == (completion.response_ids[-1] not in stops)
        assert not set(completion.response_ids[:-1]) & set(stops)
        assert len(completion.rollout_logprobs) == len(completion.response_ids) <= 8
        assert completion.truncated <= (len(completion.response_ids) == 8)
    assert progress == sorted(set(progress)) and progress[-1] == 12 and len(progress) > 1


def test_a_stop_token_in_the_last_place_is_not_truncation(engine: Engine) -> None:
    (completion,) = engine.generate(
        make_prompts(4), [0], max_tokens=1, temperature=1.0, stop_token_ids=list(range(320))
    )
    assert not completion.truncated and len(completion.response_ids) == 1


def test_samples_depend_on_the_seed_alone(engine: Engine) -> None:
    """P57: every sample of a group, or every rank, drew the same noise; or batching changed it."""
    prompt = make_prompts(6)[0]

    def sample(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        completions = engine.generate(
            prompts, seeds, max_tokens=12, temperature=1.0, stop_token_ids=[]
        )
        return [c.response_ids for c in completions]

    group = sample([prompt] * 8, list(range(8)))
    assert len({tuple(ids) for ids in group}) == 8
    assert sample([prompt] * 8, list(range(8))) == group
    assert sample([prompt, prompt], [3, 3]) == [group[3], group[3]]
    torch.manual_seed(1)  # nor on the state of the trainer
    # 40 requests are more than the engine runs at once, in another order, among other prompts
    others = make_prompts(*[11] * 32)
    mixed = sample(others + [prompt] * 8, [*range(100, 132), *reversed(range(8))])
    assert mixed[32:] == group[::-1]


def test_bad_requests_are_refused_and_leave_the_engine_usable(engine: Engine) -> None:
    def generate(prompts: list[list[int]], seeds: list[int], max_tokens: int = 4):
        return engine.generate(
            prompts, seeds, max_tokens=max_tokens, temperature=1.0, stop_token_ids=[]
        )

    assert generate([], []) == []
    for prompts, seed, max_tokens in (
        ([[]], 0, 4),
        (make_prompts(381), 0, 4),
        (make_prompts(5), 0, 380),
        (make_prompts(5), 2**32, 4),
        (make_prompts(5), -1, 4),
    ):
        with pytest.raises(ValueError, match="384 tokens|seeds"):
            generate(prompts, [seed], max_tokens)
    assert len(generate(make_prompts(380), [0])[0].response_ids) == 4
    assert len(generate(make_prompts(5), [2**32 - 1])[0].response_ids) == 4


def test_an_interrupted_generate_leaves_nothing_behind(engine: Engine) -> None:
    def stop_at_first(finished: int) -> None:
        raise KeyboardInterrupt

    kwargs = dict(temperature=1.0, stop_token_ids=list(range(0, 320, 8)))
    prompts = make_prompts(*range(2, 14))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(
            prompts, list(range(12)), max_tokens=30, on_progress=stop_at_first, **kwargs
        )
    progress: list[int] = []
    engine.generate(prompts[:2], [0, 1], max_tokens=4, on_progress=progress.append, **kwargs)
    assert progress[-1] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trainers_random_state_is_untouched(
    backend: str, model_dir: Path, trainer: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building vLLM reseeds every generator, and sampling draws from torch's: resume was not exact.

    vLLM's worker also replaces torch.set_num_threads and LOCAL_WORLD_SIZE.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    random.seed(1), np.random.seed(2), torch.manual_seed(3)

    def state() -> tuple[object, ...]:
        numpy = np.random.get_state(legacy=False)["state"]
        rng = (
            random.getstate(),
            numpy["key"].tolist(),
            numpy["pos"],
            torch.get_rng_state().tolist(),
        )
        return *rng, torch.set_num_threads, torch.get_num_threads(), os.environ["LOCAL_WORLD_SIZE"]

    before = state()
    engine = make_engine(model_dir, backend)
    assert state() == before
    WeightSync(trainer, engine).sync()
    assert state() == before
    engine.generate(make_prompts(5), [1], max_tokens=5, temperature=1.0, stop_token_ids=[])
    assert state() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_samples_without_weights(backend: str, model_dir: Path) -> None:
    """P58: the first rollout (of a run, or after a resume) used whatever the engine had loaded."""
    engine = make_engine(model_dir, backend)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(make_prompts(5), [1], max_tokens=5, temperature=1.0, stop_token_ids=[])


def test_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    """A synced Qwen3-MoE sampled from wrong weights without an error."""
    config = AutoConfig.for_model("qwen3_moe", num_experts=4, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"--model={tmp_path}.*mixture of experts"):
        make_engine(tmp_path, "vllm")


@pytest.mark.parametrize(
    "model_type, architecture",
    [("smollm3", "SmolLM3ForCausalLM"), ("helium", "HeliumForCausalLM")],
)
def test_models_of_vllms_transformers_backend_are_refused(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    """That backend patches the Hugging Face classes that the trainer's model is made of."""
    AutoConfig.for_model(model_type, architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"--model={tmp_path}.*Transformers.*--engine=transform"):
        make_engine(tmp_path, "vllm")


def test_transformers_engine_has_no_tensor_parallelism(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="--engine_tensor_parallel=2"):
        make_engine(model_dir, "transformers", tensor_parallel=2)


def test_sleep_and_wake_order() -> None:
    """P53: weights loaded while asleep, or the KV cache awake before them, on CUDA."""
    calls: list[str] = []

    class RecordedLLM:
        def sleep(self, level: int) -> None:
            calls.append(f"sleep {level}")

        def wake_up(self, tags: list[str]) -> None:
            calls.append(f"wake {tags[0]}")

        def collective_rpc(self, *args: object, **kwargs: object) -> None:
            calls.append("load")

        def reset_prefix_cache(self) -> bool:
            calls.append("reset")
            return True

    engine = object.__new__(VllmEngine)
    Engine.__init__(engine, dtype=torch.float32, max_model_len=8, device=torch.device("cuda"))
    engine.llm, engine._asleep = RecordedLLM(), set()
    engine.load_weights([])
    engine.sleep()
    engine.sleep()  # twice is once
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([[1]], [0], max_tokens=1, temperature=1.0, stop_token_ids=[])
    with pytest.raises(AssertionError, match="wake_weights"):
        engine.load_weights([])
    engine.wake_weights()
    with pytest.raises(AssertionError, match="before the KV cache"):
        engine.wake_kv_cache()
    engine.load_weights([])
    engine.wake_kv_cache()
    wanted = ["load", "reset", "sleep 2", "wake weights", "load", "reset", "wake kv_cache", "reset"]
    assert calls == wanted
    engine.wake_weights(), engine.wake_kv_cache()
    assert calls == wanted


def test_two_plain_python_jobs_at_once(model_dir: Path) -> None:
    """Without torchrun's variables no port is needed, so jobs on one node cannot collide."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    env |= {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "run_engine.py"), str(model_dir)]
    jobs = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("[[") and outputs[0].count("\n") == 1  # and no library chatter
