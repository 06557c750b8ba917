r"""Speed of our scripts against a peer's, alternately on the same machine, model, data and batch.

    python scripts/benchmark.py grpo --rounds 3
    python scripts/benchmark.py grpo --model runs/demo/sft/final --dataset runs/demo/toy/rl.jsonl \
        --prompts 32 --samples 8 --tokens 12
    python scripts/benchmark.py sft --rounds 3 --steps 20
    python scripts/benchmark.py dpo --rounds 3 --steps 20
    python scripts/benchmark.py reward_model --rounds 3 --steps 20
    python scripts/benchmark.py ppo --rounds 3

grpo: one optimizer step on P x G completions, by default of a random 3.3M-parameter Qwen3, which
hardly ever stops early, so both sides sample the same number of tokens. sft: P prompts with their
completions, of log-normal lengths. dpo, reward_model: P pairs, likewise; TRL's "grouped" has a
sampler that puts pairs of one length together, which TRL itself does not offer for pairs, and its
"precomputed" reference log-probs are not timed, as ours are not. Tokens of pairs are those of both
sides in full, however they are computed. ppo: the same samples and one update as grpo, against
grpo.py, which has neither critic nor reference (TRL 1.16 has no PPO). The first steps of every run
are dropped. Numbers in the README come from here: medians over rounds and ratios within a round,
because the speed of a shared machine drifts.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_STEPS = 3
DEFAULTS = {"grpo": (8, 64), "ppo": (8, 64), "sft": (16, 512), "dpo": (8, 512)}
DEFAULTS["reward_model"] = DEFAULTS["dpo"]
"""what is raced -> prompts or pairs of a step, longest completion or sequence"""
RACE_OPTIONS = (
    *("what", "steps", "prompts", "samples", "tokens", "threads", "dtype"),
    *("model", "dataset"),
)
REWARD = (
    "def reward(prompts, completions, answer, **columns):\n"
    "    return [1.0 if c.strip().startswith(a) else 0.1 * (a[0] in c)\n"
    "            for c, a in zip(completions, answer)]\n"
)


def make_task(folder: Path) -> None:
    """Model, prompts and reward of the race, deterministic."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world 1 + 2 = 3"] * 100, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    pad, eos = 0, 1  # special tokens come first
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(2000):
            a, b = generator.randrange(100), generator.randrange(100)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    words = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=2 + i % 7)) for i in range(500)
    ]

    def text(median: float, sigma: float, longest: int) -> str:
        length = min(longest, max(8, int(generator.lognormvariate(math.log(median), sigma))))
        return " ".join(generator.choices(words, k=length))[:length].strip()

    with (folder / "sft.jsonl").open("w") as file:
        for _ in range(2000):
            row = {"prompt": text(40, 0.6, 120), "completion": " " + text(80, 0.7, 380)}
            file.write(json.dumps(row) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(2000):
            row = {"prompt": text(40, 0.6, 120)}
            row |= {side: " " + text(80, 0.7, 380) for side in ("chosen", "rejected")}
            file.write(json.dumps(row) + "\n")


def matmul_flops(threads: int, dtype: str) -> float:
    """Floating-point operations per second of a large matrix product: what the machine can do."""
    import torch

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    best = math.inf
    for _ in range(12):
        start = time.perf_counter()
        (a @ b).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def flops_per_token(model: Path) -> tuple[int, int]:
    """Forward and backward: of the decoder's matrices for any token, of the head for a trained one.

    Attention is left out (it depends on lengths), so the efficiency is a lower bound.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        full = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = full.get_output_embeddings().weight
    inside = [p for p in full.get_decoder().parameters() if p.ndim == 2]
    embedding = full.get_input_embeddings().weight.numel()
    return 6 * (sum(p.numel() for p in inside) - embedding), 6 * head.numel()


def run_script(
    script: str, folder: Path, options: argparse.Namespace, ranks: int, flags: dict[str, Any]
) -> list[dict[str, Any]]:
    """Metrics of one run of a script, without those of the first steps."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    flags = {
        "output_dir": folder / "ours",
        "overwrite": True,
        "num_steps": options.steps,
        "learning_rate": 1e-4,
        "dtype": options.dtype,
        **flags,
    }
    line = [*launcher, str(ROOT / script)]
    line += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, options.threads // ranks))}
    subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(row) for row in (folder / "ours" / "metrics.jsonl").open()]
    return [row for row in rows if row["step"] > SKIPPED_STEPS]


def ours_sft(folder: Path, options: argparse.Namespace, ranks: int, **flags: Any) -> dict[str, Any]:
    """One run of sft.py; mean seconds and tokens of a step."""
    rows = run_script(
        "sft.py",
        folder,
        options,
        ranks,
        {
            "model": options.model or folder / "model",
            "dataset": options.dataset or folder / "sft.jsonl",
            "sequences_per_step": options.prompts,
            "max_sequence_tokens": options.tokens,
            "prompt_format": "text",
            "lr_schedule": "constant",
            **flags,
        },
    )
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    return {
        "step_s": means["time/step_s"],
        "tokens": means["data/tokens"],
        "targets": means["policy/loss_tokens"],
        "padding": means["data/padding"],
        "peak_gb": rows[-1]["memory/peak_gb"],
    }


def ours_pairs(
    folder: Path, options: argparse.Namespace, ranks: int, **flags: Any
) -> dict[str, Any]:
    """One run of dpo.py or reward_model.py; mean seconds and tokens of a step."""
    rows = run_script(
        f"{options.what}.py",
        folder,
        options,
        ranks,
        {
            "model": options.model or folder / "model",
            "dataset": options.dataset or folder / "pairs.jsonl",
            "pairs_per_step": options.prompts,
            "max_sequence_tokens": options.tokens,
            "lr_schedule": "constant",
            **({} if options.model else {"prompt_format": "text"}),
            **flags,
        },
    )
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    return {
        "step_s": means["time/step_s"],
        "pairs_per_s": options.prompts / means["time/step_s"],
        "tokens": means["data/tokens"] + means["data/shared_tokens"],
        "padding": means["data/padding"],
        "peak_gb": rows[-1]["memory/peak_gb"],
    }


def ours(
    folder: Path, options: argparse.Namespace, ranks: int, script: str = "grpo.py"
) -> dict[str, Any]:
    """One run of grpo.py or ppo.py, an update a step; mean seconds per step, by phase."""
    flags: dict[str, Any] = {
        "model": options.model or folder / "model",
        "dataset": options.dataset or folder / "prompts.jsonl",
        "rewards": f"{folder / 'reward.py'}:reward",
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
        "num_minibatches": 1,
        "max_prompt_tokens": 16,
        "max_response_tokens": options.tokens,
    }
    rows = run_script(script, folder, options, ranks, flags)
    result = {
        key.removeprefix("time/"): statistics.mean(row[key] for row in rows)
        for key in rows[0]
        if key.startswith("time/") and key.endswith("_s") and "tokens" not in key
    }
    sampled = options.prompts * options.samples
    result["tokens"] = statistics.mean(row["rollout/response_tokens"] for row in rows) * sampled
    return result | {"peak_gb": rows[-1]["memory/peak_gb"]}


def trl(folder: Path, options: argparse.Namespace, **how: Any) -> dict[str, Any]:
    """One run of TRL's trainer in a fresh process; mean seconds per step."""
    settings = {name: getattr(options, name) for name in RACE_OPTIONS}
    settings |= {"folder": str(folder), **how}
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    answer = subprocess.run(
        [sys.executable, __file__, "--trl", json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        sys.exit(answer.stderr[-3000:])
    return json.loads(answer.stdout.splitlines()[-1])


def trl_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What all of TRL's trainers get."""
    import torch

    return {
        "output_dir": str(Path(settings["folder"]) / "trl"),
        "max_steps": settings["steps"],
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": settings["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1000,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
    }


def trl_data(settings: dict[str, Any], name: str) -> Any:
    """Rows of the race, or of the user's file, as TRL's trainers take them."""
    from datasets import load_dataset

    folder = Path(settings["folder"])
    files = settings["dataset"] or str(folder / name)
    return load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))


def step_clock(num_counts: int) -> tuple[Any, list[float], list[list[int]]]:
    """A callback, the seconds of each step that it notes, and counters that start at 0 in each."""
    from transformers import TrainerCallback

    seconds: list[float] = []
    counts: list[list[int]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()
            counts.append([0] * num_counts)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    return Clock(), seconds, counts


def run_trl_sft(settings: dict[str, Any]) -> None:
    """TRL's SFTTrainer; prints one JSON line."""
    import resource

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from trl import SFTConfig, SFTTrainer

    folder = Path(settings["folder"])
    clock, seconds, counts = step_clock(3)  # tokens, slots, targets

    class Counted(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            slots = inputs["input_ids"].numel()
            mask = inputs.get("attention_mask")
            counts[-1][0] += slots if mask is None else int(mask.sum())
            counts[-1][1] += slots
            counts[-1][2] += int((inputs["labels"] != -100).sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    how: dict[str, Any] = {"per_device_train_batch_size": settings["prompts"]}
    if settings["mode"] == "packed":  # about as many tokens per step, in rows of full length
        how = {"packing": True, "packing_strategy": "bfd"}
        how["per_device_train_batch_size"] = max(1, settings["prompts"] // 4)
    elif settings["mode"] != "default":
        how["train_sampling_strategy"] = "group_by_length"
    if settings["mode"] == "grouped, compiled":
        how |= {"torch_compile": True, "torch_compile_backend": "inductor"}
    config = SFTConfig(max_length=settings["tokens"], **trl_settings(settings), **how)
    data = trl_data(settings, "sft.jsonl")
    trainer = Counted(
        model=settings["model"] or str(folder / "model"),
        args=config,
        train_dataset=data,
        callbacks=[clock],
    )
    trainer.train()
    tokens, slots, targets = (
        statistics.mean(column) for column in zip(*counts[SKIPPED_STEPS:], strict=True)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {"step_s": statistics.mean(seconds[SKIPPED_STEPS:]), "tokens": tokens}
    result |= {"targets": targets, "padding": 1 - tokens / slots, "peak_gb": peak}
    print(json.dumps(result), flush=True)


def run_trl_pairs(settings: dict[str, Any]) -> None:
    """TRL's DPOTrainer or RewardTrainer; prints one JSON line."""
    import resource

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers.trainer_pt_utils import LengthGroupedSampler
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    folder = Path(settings["folder"])
    is_dpo = settings["what"] == "dpo"
    clock, seconds, counts = step_clock(2)  # tokens, slots

    trainer_class: Any = DPOTrainer if is_dpo else RewardTrainer

    class Counted(trainer_class):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counts[-1][0] += int(inputs["attention_mask"].sum())
            counts[-1][1] += inputs["attention_mask"].numel()
            return super().compute_loss(model, inputs, *args, **kwargs)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if "grouped" not in settings["mode"]:
                return super()._get_train_sampler(train_dataset)
            sides = [self.train_dataset[f"{side}_ids"] for side in ("chosen", "rejected")]
            lengths = [max(len(c), len(r)) for c, r in zip(*sides, strict=True)]
            if is_dpo:
                prompts = self.train_dataset["prompt_ids"]
                lengths = [n + len(p) for n, p in zip(lengths, prompts, strict=True)]
            return LengthGroupedSampler(settings["prompts"], lengths=lengths)

    how: dict[str, Any] = {"per_device_train_batch_size": settings["prompts"]}
    if "precomputed" in settings["mode"]:
        how["precompute_ref_log_probs"] = True
    data = trl_data(settings, "pairs.jsonl")
    if "conversations" in data.column_names:  # the form that TRL reads
        roles = {"human": "user", "gpt": "assistant", "system": "system"}

        def to_messages(row: dict[str, Any]) -> dict[str, Any]:
            def convert(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
                return [{"role": roles[t["from"]], "content": t["value"]} for t in turns]

            sides = {side: convert([row[side]]) for side in ("chosen", "rejected")}
            return {"prompt": convert(row["conversations"])} | sides

        data = data.map(to_messages, remove_columns=data.column_names)
    config = (DPOConfig if is_dpo else RewardConfig)(
        max_length=settings["tokens"], **trl_settings(settings), **how
    )
    trainer = Counted(
        model=settings["model"] or str(folder / "model"),
        args=config,
        train_dataset=data,
        callbacks=[clock],
    )
    trainer.train()
    tokens, slots = (
        statistics.mean(column) for column in zip(*counts[SKIPPED_STEPS:], strict=True)
    )
    step_s = statistics.mean(seconds[SKIPPED_STEPS:])
    result = {"step_s": step_s, "pairs_per_s": settings["prompts"] / step_s, "tokens": tokens}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(result | {"padding": 1 - tokens / slots, "peak_gb": peak}), flush=True)


def run_trl(settings: dict[str, Any]) -> None:
    """The peer's side, with its fastest CPU settings; prints one JSON line."""
    import resource

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch
    from trl import GRPOConfig, GRPOTrainer

    if settings["vllm"]:
        # TRL's weight sync cannot write to the packed weights of vLLM's CPU build; plain ones work.
        import vllm.model_executor.layers.utils as layers

        def keep_plain(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        layers.dispatch_cpu_unquantized_gemm = keep_plain
    folder = Path(settings["folder"])
    namespace: dict[str, Any] = {}
    exec((folder / "reward.py").read_text(), namespace)
    clock, seconds, counts = step_clock(1)  # tokens

    class Counted(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counts[-1][0] += int(inputs["completion_mask"].sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    engine: dict[str, Any] = {"use_vllm": False}
    if settings["vllm"]:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 16 + settings["tokens"],
            "vllm_importance_sampling_correction": True,
        }
    config = GRPOConfig(
        per_device_train_batch_size=settings["prompts"] * settings["samples"],
        num_generations=settings["samples"],
        max_completion_length=settings["tokens"],
        beta=0.0,
        temperature=1.0,
        **trl_settings(settings),
        **engine,
    )
    data = trl_data(settings, "prompts.jsonl")
    trainer = Counted(
        model=settings["model"] or str(folder / "model"),
        args=config,
        train_dataset=data,
        reward_funcs=namespace["reward"],
        callbacks=[clock],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {"step_s": statistics.mean(seconds[SKIPPED_STEPS:]), "peak_gb": peak}
    tokens = statistics.mean(count for (count,) in counts[SKIPPED_STEPS:])
    print(json.dumps(result | {"tokens": tokens}), flush=True)
    os._exit(0)  # vLLM's teardown under TRL prints a traceback


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=list(DEFAULTS), default="grpo")
    parser.add_argument("--rounds", type=int, default=3, help="every side runs once per round")
    parser.add_argument("--steps", type=int, default=12, help=f"the first {SKIPPED_STEPS} dropped")
    parser.add_argument("--prompts", type=int, help="prompts or pairs per step (8; sft: 16)")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--tokens", type=int, help="longest completion (64), or sequence (512)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each side")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", help="another model than the random one (with --dataset)")
    parser.add_argument("--dataset", help="its jsonl file: prompt and answer, completion or pair")
    parser.add_argument(
        "--compile", action="store_true", help="sft, pairs: with torch.compile, too"
    )
    parser.add_argument("--only", nargs="+", help="names of the sides to run, as printed")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "benchmark")
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl is not None:
        {"sft": run_trl_sft, "grpo": run_trl}.get(options.trl["what"], run_trl_pairs)(options.trl)
        return
    sft, pairs = options.what == "sft", options.what in ("dpo", "reward_model")
    options.prompts = options.prompts or DEFAULTS[options.what][0]
    options.tokens = options.tokens or DEFAULTS[options.what][1]
    folder: Path = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_task(folder)
    peers = ["TRL, vLLM", "TRL, transformers"]
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "unroll, 1 rank": lambda: ours(folder, options, 1),
        "unroll, 2 ranks": lambda: ours(folder, options, 2),
        "TRL, vLLM": lambda: trl(folder, options, vllm=True),
        "TRL, transformers": lambda: trl(folder, options, vllm=False),
    }
    if options.what == "ppo":
        peers = ["grpo.py"]
        sides = {
            "ppo.py, 1 rank": lambda: ours(folder, options, 1, "ppo.py"),
            "ppo.py, 2 ranks": lambda: ours(folder, options, 2, "ppo.py"),
            "grpo.py": lambda: ours(folder, options, 1),
        }
    if sft:
        peers = ["TRL, grouped", "TRL, default", "TRL, packed"]
        sides = {
            "unroll, 1 rank": lambda: ours_sft(folder, options, 1),
            "unroll, 2 ranks": lambda: ours_sft(folder, options, 2),
        }
        for peer in peers:
            mode = peer.removeprefix("TRL, ")
            sides[peer] = lambda mode=mode: trl(folder, options, mode=mode)
        if options.compile:
            peers.append("TRL, grouped, compiled")
            sides["unroll, compiled"] = lambda: ours_sft(folder, options, 1, compile=True)
            sides[peers[-1]] = lambda: trl(folder, options, mode="grouped, compiled")
    if pairs:
        peers = ["TRL, grouped", "TRL, default"]
        if options.what == "dpo":
            peers = [
                "TRL, grouped, precomputed",
                "TRL, grouped",
                "TRL, precomputed",
                "TRL, default",
            ]
        sides = {
            "unroll, 1 rank": lambda: ours_pairs(folder, options, 1),
            "unroll, 2 ranks": lambda: ours_pairs(folder, options, 2),
            "unroll, prompts twice": lambda: ours_pairs(folder, options, 1, prefix_sharing=False),
        }
        if options.compile:
            sides["unroll, compiled"] = lambda: ours_pairs(folder, options, 1, compile=True)
        if options.what == "dpo":
            sides["unroll, live"] = lambda: ours_pairs(folder, options, 1, reference="live")
        for peer in peers:
            mode = peer.removeprefix("TRL, ")
            sides[peer] = lambda mode=mode: trl(folder, options, mode=mode)
    if options.only:
        if unknown := set(options.only) - set(sides):
            parser.error(f"--only: {sorted(unknown)} not in {list(sides)}")
        sides = {name: side for name, side in sides.items() if name in options.only}
        peers = [name for name in peers if name in sides]
    of_any = of_trained = peak = 0.0
    if sft:
        model = Path(options.model or folder / "model")
        of_any, of_trained = flops_per_token(model)
        peak = matmul_flops(options.threads, options.dtype)
        print(f"a matrix product does {peak / 1e9:.0f} GFLOP/s")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, side in sides.items():
            result = side()
            if sft:
                flops = of_any * result["tokens"] + of_trained * result["targets"]
                result["tokens_per_s"] = result["tokens"] / result["step_s"]
                result["efficiency"] = flops / result["step_s"] / peak
            if pairs:
                result["tokens_per_s"] = result["tokens"] / result["step_s"]
            results[name].append(result)
            row = {key: round(value, 3) for key, value in results[name][-1].items()}
            print(f"round {number + 1}  {name:18} {row}", flush=True)
    unit = "tokens_per_s" if sft or pairs else "step_s"
    print(f"\nmedian over rounds of {unit}; speed relative to the peer in the same round")
    for name in sides:
        line = f"{name:22} {statistics.median(r[unit] for r in results[name]):9.3f}"
        for peer in peers:
            both = zip(results[peer], results[name], strict=True)
            ratios = (p[unit] / o[unit] if unit == "step_s" else o[unit] / p[unit] for p, o in both)
            line += f"   {statistics.median(ratios):5.2f}x {peer}"
        print(line)
    (folder / f"{options.what}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
