"""SFT: supervised fine-tuning by maximum likelihood of the response tokens.

loss = - sum over trained tokens of log pi(token | what precedes it in its own sequence), divided by
the number of trained tokens of the optimizer step, counted over all ranks and microbatches.

Deviations from common practice:
[D1] one mean over all trained tokens of a step, not a mean of per-sequence or per-rank means.
[D2] a turn is trained in the context in which it would be sampled: a conversation whose template
     rewrites earlier turns (drops their reasoning) becomes several sequences.
[D3] packed rows hold whole sequences of one step, by best fit, without padding. Packing decides
     where a sequence is computed, never which step it belongs to, so it cannot change results.

Launch:
    python sft.py --model M --dataset D.jsonl --output_dir runs/a --num_steps 100
    torchrun --standalone --nproc-per-node 8 sft.py ...same flags...
Expected result: `bash scripts/demo.sh` warm-starts its toy model with it (two CPU cores).

S sequences of a step, T packed tokens of a row.
"""

import common  # noqa: F401  isort: skip  (first: sets the environment for torch and vLLM)

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from transformers import PreTrainedTokenizerBase

from common.data import TokenDataset, load_sft_rows, render_example, stop_token_ids
from common.dist import parse_args, print0, setup, shutdown
from common.logprobs import compute_logprobs
from common.lora import LoraSettings
from common.model import (
    check_fits,
    clip_grad_norm,
    export_adapter,
    export_hf,
    load_generation_config,
    load_model,
    load_tokenizer,
)
from common.packing import PackedRow, pack, plan_microbatches
from common.tracking import Tracker, prepare_output_dir
from common.weight_sync import stream_full_tensors


@tyro.conf.configure(tyro.conf.FlagConversionOff)
@dataclass
class Args:
    """Fine-tune a language model on demonstrations."""

    # -- shared: run and model args --
    model: str
    """folder or hub name of the model to start from"""
    output_dir: str
    """folder for args.json, metrics.jsonl, samples and the final checkpoint"""
    overwrite: bool = False
    """write over the run that output_dir already holds"""
    num_steps: int = 100
    """training steps"""
    seed: int = 0
    """decides data order and sampling; the same command gives the same numbers on the CPU"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; auto: bfloat16 on GPU, float32 on CPU. Parameters and optimizer are float32"""
    lora_rank: int | None = None
    """train low-rank adapters of this rank, not the weights; wants about 10x the learning rate"""
    lora_alpha: int = 32
    """the adapters' contribution is scaled by lora_alpha / lora_rank"""
    lora_target: tuple[str, ...] = ()
    """linear layers that get adapters, such as q_proj v_proj; none: all of the decoder's"""
    activation_checkpointing: bool = False
    """recompute layers in the backward pass: less memory, same results, about a third slower"""
    cpu_offload: bool = False
    """GPU only: parameters, gradients and optimizer state in host memory; same results, slower"""
    compile: bool = False
    """torch.compile every decoder layer: a slow start, then faster steps; same results"""
    replicas: int = 1
    """HSDP: full copies of the sharded model (1: shard over all ranks); must divide the ranks"""
    timeout_s: float = 1800.0
    """seconds until a collective that some rank never reaches fails; longer than a slow rollout"""
    # -- end shared --
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the final checkpoint"""

    num_epochs: float | None = None
    """passes over the data, as many as --dataset has rows; replaces num_steps (rounded up)"""

    # data
    dataset: tuple[str, ...] = ()
    """files, folders or hub names (name:config:split), each with a slice or not: a.jsonl[:90%]"""
    # -- shared: data args --
    dataset_weights: tuple[float, ...] | None = None
    """how much of the training rows each --dataset name gives, as ratios; None: every row once"""
    dataset_split: str = "train"
    """split of hub datasets that name none, and of folders whose files are named by split"""
    system_prompt: str | None = None
    """put before every conversation that brings no system message of its own"""
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """chat: through the chat template; text: as it is; auto: chat where there is a template"""
    chat_template: str | None = None
    """file with a Jinja template that replaces the tokenizer's own, also in the final checkpoint"""
    chat_template_args: str = "{}"
    """JSON object of further arguments of the template, for example '{"enable_thinking": false}'"""
    # -- end shared --
    train_on: Literal["all_turns", "last_turn", "full"] = "all_turns"
    """assistant turns that are targets, or every token; `text` rows are always trained in full"""
    max_sequence_tokens: int = 2048
    """longest sequence; see overlong"""
    overlong: Literal["drop", "truncate"] = "drop"
    """longer sequences are dropped, or lose their tail; both are counted"""
    cache_dir: str | None = "~/.cache/unroll"
    """where tokenised data is kept for the next run; None: nowhere"""
    preview: int = 0
    """print so many examples with their trained tokens marked, and exit"""

    # optimization
    sequences_per_step: int = 64
    """S, global"""
    max_tokens_per_microbatch: int = 16_384
    """packed tokens per forward (per rank); lower on OOM, results do not change"""
    packing: bool = True
    """best fit over the sequences of a step [D3]; False: one sequence per forward; same results"""
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """after the warm-up; wsd: constant, then linear decay at the end"""
    warmup_ratio: float = 0.03
    """share of the run that is linear warm-up; --warmup_steps sets it in steps"""
    # -- shared: optimizer args --
    warmup_steps: int | None = None
    """optimizer steps of linear warm-up; None: warmup_ratio decides"""
    decay_ratio: float = 0.1
    """wsd: share of the run, at its end, in which the learning rate falls"""
    min_lr_ratio: float = 0.0
    """share of the peak at which linear, cosine and wsd end"""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, of matrices; norms and biases are left alone"""
    adam_beta1: float = 0.9
    """decay of the gradient mean"""
    adam_beta2: float = 0.95
    """decay of the squared gradient mean"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this global norm"""
    # -- end shared --

    # evaluation
    eval_dataset: tuple[str, ...] = ()
    """held-out rows in the same formats; every row is counted exactly once"""
    eval_split: str = "test"
    """like dataset_split"""
    eval_every_steps: int = 50
    """also before the first and after the last step"""

    # -- shared: tracking args --
    wandb_project: str | None = None
    """log to this wandb project"""
    wandb_name: str | None = None
    """name of the wandb run"""
    # -- end shared --

    @property
    def optimizer_steps(self) -> int:
        """planned optimizer steps of the run, the clock of the learning rate"""
        return self.num_steps

    @property
    def inputs(self) -> tuple[str, ...]:
        """models and data that the run reads, and must not overwrite"""
        return (self.model, *self.dataset, *self.eval_dataset)

    # -- shared: derived args --
    @property
    def num_warmup_steps(self) -> int:
        """optimizer steps of linear warm-up"""
        if self.warmup_steps is None:
            return math.ceil(self.warmup_ratio * self.optimizer_steps)
        return self.warmup_steps

    @property
    def lora(self) -> LoraSettings | None:
        """adapters to train, or None for all weights"""
        if self.lora_rank is None:
            return None
        return LoraSettings(self.lora_rank, self.lora_alpha, self.lora_target)

    @property
    def template_args(self) -> Any:
        """--chat_template_args, parsed; None if it is no JSON"""
        try:
            return json.loads(self.chat_template_args)
        except json.JSONDecodeError:
            return None

    # -- end shared --

    def __post_init__(self) -> None:
        """Refuse what cannot work before anything expensive starts."""
        for name in (
            *("num_steps", "max_sequence_tokens", "sequences_per_step", "eval_every_steps"),
            *("replicas", "timeout_s", "max_grad_norm"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive and finite")
        for name in ("learning_rate", "weight_decay", "seed", "preview"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
        # -- shared: optimizer check --
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise ValueError(
                f"--adam_beta1={self.adam_beta1} and --adam_beta2={self.adam_beta2} "
                "must be in [0, 1)"
            )
        for name, limit in (("seed", 2**32), ("timeout_s", 1e9)):
            if getattr(self, name) >= limit:
                raise ValueError(f"--{name}={getattr(self, name)} must be below {limit:.0f}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"--warmup_steps={self.warmup_steps} must not be negative")
        for name in ("warmup_ratio", "decay_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be in [0, 1]")
        # -- end shared --
        # -- shared: data and LoRA check --
        if self.dataset_weights is not None and (
            len(self.dataset_weights) != len(self.dataset)
            or not all(0 < weight < math.inf for weight in self.dataset_weights)
        ):
            raise ValueError(
                f"--dataset_weights={self.dataset_weights}: expected one positive number for each "
                f"of the {len(self.dataset)} names of --dataset"
            )
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"--chat_template={self.chat_template}: no such file")
        if not isinstance(self.template_args, dict):
            raise ValueError(
                f"--chat_template_args={self.chat_template_args}: expected a JSON object"
            )
        if self.lora_target and self.lora_rank is None:
            raise ValueError(f"--lora_target={self.lora_target} needs --lora_rank")
        _ = self.lora  # checks rank and alpha
        # -- end shared --
        if self.num_epochs is not None and not 0 < self.num_epochs < math.inf:
            raise ValueError(f"--num_epochs={self.num_epochs} must be positive and finite")
        if not self.dataset:
            raise ValueError("--dataset is required")
        if self.max_tokens_per_microbatch < self.max_sequence_tokens:
            raise ValueError(
                f"--max_tokens_per_microbatch={self.max_tokens_per_microbatch} must hold one whole "
                f"sequence: --max_sequence_tokens={self.max_sequence_tokens}"
            )


# -- shared: schedule --
def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    schedule: str,
    decay_ratio: float,
    min_ratio: float,
) -> float:
    """Learning rate of optimizer step `step` (from 0), as a share of the peak.

    Linear warm-up, then constant, or down to `min_ratio`: along a line or a half cosine from the
    end of the warm-up, or along a line over the last `decay_ratio` of the run (wsd: warm-up,
    stable, decay; MiniCPM, arXiv:2404.06395).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, total_steps - round(decay_ratio * total_steps))
    progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_ratio + (1.0 - min_ratio) * share


# -- end shared --


# -- shared: data order --
@lru_cache(maxsize=2)
def epoch_order(
    epoch: int, sizes: tuple[int, ...], weights: tuple[float, ...] | None, seed: int
) -> np.ndarray:
    """Rows of one epoch in their order; datasets of `sizes` rows are numbered one after the other.

    Without weights an epoch is every row once. With weights it is equally long, but each dataset
    gives its share. A dataset is walked in permutations of its own that go on from epoch to epoch,
    so that its rows are used equally often, give or take one.

    Raises:
        ValueError: a weight is too small for a single row per epoch, or a dataset is empty.
    """
    total = sum(sizes)
    rows = np.arange(total)
    if weights is not None:
        shares = np.array(weights) / max(weights)
        ends = np.rint(np.cumsum(shares) / shares.sum() * total).astype(int)
        counts = np.diff(ends, prepend=0)
        if not counts.all() or 0 in sizes:
            raise ValueError(
                f"--dataset_weights={weights}: of {total} rows an epoch, datasets of "
                f"{list(sizes)} rows give {counts.tolist()}"
            )
        parts: list[np.ndarray] = []
        for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            rounds, places = np.divmod(np.arange(epoch * count, (epoch + 1) * count), size)
            for number in np.unique(rounds):
                walk = np.random.default_rng((seed, source, int(number))).permutation(size)
                parts.append(sum(sizes[:source]) + walk[places[rounds == number]])
        rows = np.concatenate(parts)
    return rows[np.random.default_rng((seed, epoch)).permutation(total)]


def describe_mixture(
    names: tuple[str, ...], sizes: tuple[int, ...], weights: tuple[float, ...], seed: int
) -> str:
    """How often an epoch passes over each dataset: a small one may be repeated many times."""
    order = epoch_order(0, sizes, weights, seed)
    starts = np.cumsum((0, *sizes))
    lines = ["mixture, per epoch:"]
    for name, size, start in zip(names, sizes, starts[:-1], strict=True):
        count = int(((order >= start) & (order < start + size)).sum())
        lines.append(f"  {name}: {count / len(order):.1%} of the rows, {count / size:.2f} passes")
    return "\n".join(lines)


def batch_indices(
    step: int,
    *,
    sizes: tuple[int, ...],
    weights: tuple[float, ...] | None,
    rows_per_step: int,
    seed: int,
) -> list[int]:
    """Rows of step `step` (from 1): epochs follow each other without a gap, no row is lost."""
    indices: list[int] = []
    for position in range((step - 1) * rows_per_step, step * rows_per_step):
        epoch, offset = divmod(position, sum(sizes))
        indices.append(int(epoch_order(epoch, sizes, weights, seed)[offset]))
    return indices


# -- end shared --


# -- shared: token slots --
def token_slots(plan: list[list[list[int]]], lengths: np.ndarray) -> int:
    """Tokens that all ranks could have computed in the time of a [rank][microbatch] plan.

    Ranks wait for the longest of the microbatches that run at the same time. Rows themselves are
    not padded, so what is not a slot of a token is a rank's waiting (or its dummy row).
    """
    loads = [[sum(int(lengths[i]) for i in members) for members in of_rank] for of_rank in plan]
    return len(plan) * sum(max(column) for column in zip(*loads, strict=True))


# -- end shared --


# -- shared: memory --
def peak_memory_gb(device: torch.device) -> float:
    """Peak of this rank in GiB: allocated GPU memory, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- end shared --


# ---- data: what forks change first ----


def load(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    flag: str,
    *,
    limit: int | None = None,
) -> TokenDataset:
    """Sequences of --dataset or --eval_dataset [D2]; prints what they are and what was dropped.

    Rank 0 tokenises, or finds the result of an earlier run; the others get it.  # collective
    """
    evaluation = flag == "--eval_dataset"
    dataset, report = load_sft_rows(
        list(args.eval_dataset if evaluation else args.dataset),
        tokenizer,
        max_tokens=args.max_sequence_tokens,
        system_prompt=args.system_prompt,
        prompt_format=args.prompt_format,
        train_on=args.train_on,
        overlong=args.overlong,
        template_kwargs=args.template_args,
        stop_ids=stop_ids,
        cache_dir=None if args.cache_dir is None else Path(args.cache_dir),
        limit=limit,
        split=args.eval_split if evaluation else args.dataset_split,
        flag=flag,
    )
    if os.environ.get("RANK", "0") == "0":
        print(report, flush=True)
    return dataset


def preview(args: Args) -> None:
    """Print examples as they are trained; leaves nothing behind."""
    tokenizer = load_tokenizer(args.model, chat_template=args.chat_template)
    stop_ids = stop_token_ids(tokenizer, load_generation_config(args.model), args.template_args)
    dataset = load(args, tokenizer, stop_ids, "--dataset", limit=args.preview)
    for number, row in enumerate(dataset, start=1):
        print(
            f"\n---- example {number}: {sum(row.loss_mask)} of {len(row.input_ids)} tokens trained"
        )
        cut = args.overlong == "truncate" and len(row.input_ids) == args.max_sequence_tokens
        text = render_example(row, tokenizer, max_chars=100_000, color=sys.stdout.isatty())
        print(text + ("\n(as long as --max_sequence_tokens: may be cut)" if cut else ""))


def main(args: Args) -> None:
    if args.preview:
        if os.environ.get("RANK", "0") == "0":
            preview(args)
        return

    # ---- [1] setup ----
    # -- shared: setup --
    output_dir = prepare_output_dir(args.output_dir, overwrite=args.overwrite, inputs=args.inputs)
    env = setup(timeout_s=args.timeout_s, replicas=args.replicas)
    torch.manual_seed(args.seed)
    if args.dtype == "auto":
        dtype = torch.bfloat16 if env.device.type == "cuda" else torch.float32
    else:
        dtype = getattr(torch, args.dtype)
    if args.cpu_offload and env.device.type == "cpu":
        print0("--cpu_offload: there is no GPU here to offload from")
    tokenizer = load_tokenizer(args.model, chat_template=args.chat_template)
    stop_ids = stop_token_ids(tokenizer, load_generation_config(args.model), args.template_args)
    # -- end shared --

    # ---- [2] data ----
    dataset = load(args, tokenizer, stop_ids, "--dataset")
    print0(f"first sequence, trained tokens marked: {render_example(dataset[0], tokenizer)}")
    eval_dataset = None
    if args.eval_dataset:
        eval_dataset = load(args, tokenizer, stop_ids, "--eval_dataset")
    sizes = tuple(dataset.source_sizes)
    if args.dataset_weights is not None:
        print0(describe_mixture(args.dataset, sizes, args.dataset_weights, args.seed))
    if args.num_epochs is not None:
        num_steps = math.ceil(args.num_epochs * len(dataset) / args.sequences_per_step)
        args = replace(args, num_steps=num_steps)

    # ---- [3] models and optimizer ----
    largest_id = max(data.largest_id for data in (dataset, eval_dataset) if data is not None)
    # -- shared: policy --
    model = load_model(
        args.model,
        env,
        dtype=dtype,
        activation_checkpointing=args.activation_checkpointing,
        cpu_offload=args.cpu_offload,
        compile=args.compile,
        lora=args.lora,
        seed=args.seed,
    )
    check_fits(model, args.model, max_tokens=args.max_sequence_tokens, largest_id=largest_id)

    # -- end shared --
    # -- shared: optimizer --
    def adamw(
        network: torch.nn.Module, learning_rate: float, total_steps: int
    ) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """AdamW, which decays matrices only, and the schedule of its learning rate."""
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": args.weight_decay},
                {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: lr_factor(
                step,
                total_steps=total_steps,
                warmup_steps=args.num_warmup_steps,
                schedule=args.lr_schedule,
                decay_ratio=args.decay_ratio,
                min_ratio=args.min_lr_ratio,
            ),
        )
        return optimizer, scheduler

    optimizer, scheduler = adamw(model, args.learning_rate, args.optimizer_steps)
    # -- end shared --

    def plan(data: TokenDataset, indices: list[int]) -> list[list[list[int]]]:
        """[rank][microbatch] -> sequences of `data`; the same on every rank."""
        members = plan_microbatches(
            data.lengths[indices].tolist(),
            world_size=env.world_size,
            max_tokens=args.max_tokens_per_microbatch,
            packing=args.packing,
        )
        return [[[indices[m] for m in row] for row in of_rank] for of_rank in members]

    def pack_rows(data: TokenDataset, members: list[list[int]]) -> Iterator[PackedRow]:
        """This rank's microbatches of a plan, one at a time."""
        for indices in members:
            rows = [data[i] for i in indices]
            yield pack(
                indices, [row.input_ids for row in rows], [row.loss_mask for row in rows]
            ).to(env.device)

    @torch.no_grad()
    def evaluate(data: TokenDataset) -> dict[str, float]:
        """Mean loss per trained token over the held-out sequences, each counted once."""
        start = time.perf_counter()
        nll = torch.zeros((), dtype=torch.float64, device=env.device)
        for row in pack_rows(data, plan(data, list(range(len(data))))[env.rank]):
            logprobs, _ = compute_logprobs(model, row)
            nll -= logprobs.double().sum()
        nll = nll.cpu()
        dist.all_reduce(nll)  # collective: all ranks
        loss = nll.item() / int(data.num_targets.sum())
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "time/eval_s": time.perf_counter() - start,
        }

    # ---- [5] train loop ----
    tracker = Tracker(
        output_dir,
        asdict(args) | {"world_size": env.world_size, "resolved_dtype": str(dtype)},
        enabled=env.rank == 0,
        total_steps=args.num_steps,
        columns={
            "loss": "policy/loss",
            "eval": "eval/loss",
            "entropy": "policy/entropy",
            "grad": "optim/grad_norm",
            "lr": "optim/learning_rate",
            "s": "time/step_s",
            "tok/s": "time/tokens_per_s",
        },
        wandb_project=args.wandb_project,
        wandb_name=args.wandb_name,
        source=__file__,
    )
    if eval_dataset is not None:
        tracker.log(0, evaluate(eval_dataset))
    for step in range(1, args.num_steps + 1):
        step_start = time.perf_counter()
        tracker.phase("training")

        # (a) next batch: the same on every rank, each packs its share
        indices = batch_indices(
            step,
            sizes=sizes,
            weights=args.dataset_weights,
            rows_per_step=args.sequences_per_step,
            seed=args.seed,
        )
        # Counted once, before the first backward, over all ranks and microbatches. [D1]
        num_loss_tokens = int(dataset.num_targets[indices].sum())
        microbatches = plan(dataset, indices)

        # (e) update: one optimizer step
        loss_sum = torch.zeros((), dtype=torch.float64, device=env.device)
        entropy_sum = torch.zeros_like(loss_sum)
        for row in pack_rows(dataset, microbatches[env.rank]):
            logprobs, entropy = compute_logprobs(
                model, row
            )  # (T,) f32 each, 0 where nothing is trained
            loss = -logprobs.sum() / num_loss_tokens  # FSDP sums gradients over ranks
            loss.backward()
            loss_sum += loss.detach()
            entropy_sum += entropy.detach().double().sum()
        grad_norm = clip_grad_norm(model, args.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step}: gradient norm is {grad_norm}; no update was made")
        optimizer.step()
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()

        # (g) log: everything reduced over ranks once
        totals = torch.stack([loss_sum, entropy_sum]).cpu()
        dist.all_reduce(totals)  # collective: all ranks
        num_tokens = int(dataset.lengths[indices].sum())
        step_s = time.perf_counter() - step_start
        metrics = {
            "policy/loss": totals[0].item(),
            "policy/entropy": totals[1].item() / num_loss_tokens,
            "policy/loss_tokens": num_loss_tokens,
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": learning_rate,
            "data/epoch": step * args.sequences_per_step / len(dataset),
            "data/tokens": num_tokens,
            "data/padding": 1 - num_tokens / token_slots(microbatches, dataset.lengths),
            "time/step_s": step_s,
            "time/tokens_per_s": num_tokens / step_s,
            "memory/peak_gb": peak_memory_gb(env.device),
        }

        # (h) eval
        last = step == args.num_steps
        if eval_dataset is not None and (last or step % args.eval_every_steps == 0):
            metrics |= evaluate(eval_dataset)
        tracker.log(step, metrics)

    # ---- [6] teardown ----
    # -- shared: save --
    tracker.phase("saving")
    export_hf(
        model,
        tokenizer,
        stream_full_tensors(model, dtype=getattr(torch, args.export_dtype)),
        path=output_dir / "final",
        source=args.model,
        stop_token_ids=stop_ids,
    )
    if args.lora_rank is not None:  # `final` has the adapters merged in; here they are alone
        export_adapter(model, path=output_dir / "adapter", source=args.model)
    tracker.finish()
    print0(f"final checkpoint: {output_dir / 'final'}")
    # -- end shared --
    shutdown()


if __name__ == "__main__":
    main(parse_args(Args))
