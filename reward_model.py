"""Reward model: Bradley-Terry on preference pairs (Christiano et al. 2017, arXiv:1706.03741;
InstructGPT, arXiv:2203.02155, eq. 1) with the margin of Llama 2 (arXiv:2307.09288, eq. 2).

A language model with one scalar head scores a whole conversation at its last token:

    z = score(chosen) - score(rejected) - margin
    loss = - (1 - e) log sigmoid(z) - e log sigmoid(-z) + c (score(chosen) + score(rejected))^2

averaged over the pairs of the optimizer step, on all ranks; e is --label_smoothing, c is
--center_coef.

Deviations from the papers:
[D1] every pair counts once; InstructGPT makes all pairs of a prompt's K responses one element.
[D2] Llama 2 derives the margin from a four-step rating; here it is the data's column `margin`.
[D3] the constant that makes the mean score of reference responses 0 (InstructGPT, section 3.5)
     cannot be in the standard head, which has no bias: it is `score_bias` in config.json.

Launch:
    python reward_model.py --model M --dataset pairs.jsonl --output_dir runs/rm --num_steps 100
    torchrun --standalone --nproc-per-node 8 reward_model.py ...same flags...
Expected result: tests/test_preference_learning.py (toy pairs, two CPU cores).

P pairs of a step, T packed tokens of a row, S = 2P sequences.
"""

import common  # noqa: F401  isort: skip  (first: sets the environment for torch and vLLM)

import json
import math
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.data import stop_token_ids
from common.dist import parse_args, print0, setup, shutdown
from common.logprobs import compute_scores
from common.lora import LoraSettings
from common.model import (
    check_fits,
    choose_pad_token,
    clip_grad_norm,
    export_adapter,
    export_hf,
    load_generation_config,
    load_model,
    load_tokenizer,
)
from common.packing import PackedRow, pack, plan_microbatches
from common.pairs import PairDataset, load_pairs, overlap_report, render_pair
from common.tracking import Tracker, prepare_output_dir
from common.weight_sync import stream_full_tensors


@tyro.conf.configure(tyro.conf.FlagConversionOff)
@dataclass
class Args:
    """Train a model that scores responses, from pairs of a better and a worse one."""

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
    export_dtype: Literal["bfloat16", "float32"] = "float32"
    """dtype of the final checkpoint, in which transformers will compute its scores"""

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
    # -- shared: pair args --
    max_sequence_tokens: int = 2048
    """longest prompt plus response; see overlong"""
    overlong: Literal["drop", "truncate"] = "drop"
    """longer pairs are dropped, or cut: first the prompt's beginning, then each response's end;
    both are counted"""
    cache_dir: str | None = "~/.cache/unroll"
    """where what is computed from the data is kept for the next run; None: nowhere"""
    preview: int = 0
    """print so many pairs as the model sees them, and exit"""
    # -- end shared --

    # optimization
    # -- shared: pair batch args --
    pairs_per_step: int = 64
    """P, global"""
    max_tokens_per_microbatch: int = 16_384
    """packed tokens per forward (per rank), whole pairs; lower on OOM, results do not change"""
    packing: bool = True
    """False: one pair per forward; slower, same results"""
    prefix_sharing: bool = True
    """the prompt of a pair is computed once for both responses; False: twice, same results"""
    # -- end shared --
    learning_rate: float = 3e-6
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

    # algorithm
    label_smoothing: float = 0.0
    """chance that a label is wrong; below 0.5"""
    use_margin: bool = True
    """where a row has a `margin`, the scores must differ by that much [D2]"""
    center_coef: float = 0.0
    """weight of the squared sum of a pair's scores, which keeps their mean near 0 (0.01 does)"""
    center_dataset: tuple[str, ...] = ()
    """pairs whose chosen responses get the mean score 0 after training, by a `score_bias` [D3]"""

    # evaluation
    eval_dataset: tuple[str, ...] = ()
    """held-out pairs in the same formats; every pair is counted exactly once"""
    eval_split: str = "test"
    """like dataset_split, also for center_dataset"""
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
        return (self.model, *self.dataset, *self.eval_dataset, *self.center_dataset)

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
        # -- shared: pair check --
        for name in (
            *("num_steps", "max_sequence_tokens", "pairs_per_step", "eval_every_steps"),
            *("replicas", "timeout_s", "max_grad_norm"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive and finite")
        for name in ("learning_rate", "weight_decay", "seed", "preview"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label_smoothing={self.label_smoothing} must be in [0, 0.5)")
        if self.num_epochs is not None and not 0 < self.num_epochs < math.inf:
            raise ValueError(f"--num_epochs={self.num_epochs} must be positive and finite")
        if not self.dataset:
            raise ValueError("--dataset is required")
        if self.max_tokens_per_microbatch < 2 * self.max_sequence_tokens:
            raise ValueError(
                f"--max_tokens_per_microbatch={self.max_tokens_per_microbatch} must hold both "
                f"sides of a pair: twice --max_sequence_tokens={self.max_sequence_tokens}"
            )
        # -- end shared --
        if not 0 <= self.center_coef < math.inf:
            raise ValueError(f"--center_coef={self.center_coef} must be finite and not negative")
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


# ---- algorithm: pure functions, tested against slow float64 loops ----


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margins: Tensor,
    *,
    label_smoothing: float,
    center_coef: float,
) -> Tensor:
    """Negative log-likelihood of "chosen is better", per pair, and the centering term.

    Args:
        chosen_scores, rejected_scores, margins: (P,) float; gradients flow into the scores.
        label_smoothing: chance that the sides are exchanged.
        center_coef: weight of the squared sum of both scores (Eisenstein et al. 2023,
            arXiv:2312.09244, eq. 2).

    Returns:
        (P,); ln 2 for a tie without margin, finite for any finite scores.
    """
    z = chosen_scores - rejected_scores - margins
    loss = -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)
    return loss + center_coef * (chosen_scores + rejected_scores).square()


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two (N,) arrays, ties at their mean rank; 0 where one is constant."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[places]

    x, y = (ranks(values) - (len(values) + 1) / 2 for values in (a, b))
    norm = math.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm > 0 else 0.0


MIN_PAIRS = 50
"""fewer held-out pairs say nothing of calibration"""


def score_metrics(
    scores: np.ndarray, response_lengths: np.ndarray, grades: np.ndarray
) -> dict[str, float]:
    """What held-out pairs say about a reward model.

    Args:
        scores: (P, 2) f64, chosen and rejected.
        response_lengths: (P, 2) i64 tokens.
        grades: (P, 2) f64 scores by someone else, NaN where there are none.

    Returns:
        Metrics by name: README.md says what they mean.
    """
    margins = scores[:, 0] - scores[:, 1]

    def accuracy(some: np.ndarray) -> float:
        """Wins, and ties as half of one: what a coin would make of them."""
        wins, ties = wins_and_ties(torch.from_numpy(some))
        return (wins.item() + 0.5 * ties.item()) / len(some)

    wins, ties = wins_and_ties(torch.from_numpy(margins))
    metrics = {
        "eval/accuracy": wins.item() / len(margins),
        "eval/ties": ties.item() / len(margins),
        "eval/margin": float(margins.mean()),
        "eval/chosen_score": float(scores[:, 0].mean()),
        "eval/rejected_score": float(scores[:, 1].mean()),
    }
    scores = np.round(scores / TIE)  # a difference of rounding is none: ranks would make much of it
    metrics["eval/length_correlation"] = spearman(scores.ravel(), response_lengths.ravel())
    graded = np.isfinite(grades)
    if graded.sum() > 1:
        metrics["eval/grade_correlation"] = spearman(scores[graded], grades[graded])
    # A model that says |margin| promises the accuracy sigmoid(|margin|): is that what it has?
    deciles = np.array_split(np.argsort(np.abs(margins), kind="stable"), 10)
    gaps = []
    for number, members in enumerate(deciles if len(margins) >= MIN_PAIRS else [], start=1):
        right = accuracy(margins[members])
        promised = (1 / (1 + np.exp(-np.abs(margins[members])))).mean()
        metrics[f"eval/decile_accuracy/{number}"] = right
        gaps.append(len(members) * abs(right - promised))
    if gaps:
        metrics["eval/calibration_error"] = float(sum(gaps) / len(margins))
    # A model that prefers the longer response whatever it says has 0.5 here.
    longer = response_lengths[:, 0] - response_lengths[:, 1]
    if (longer > 0).any() and (longer < 0).any():
        parts = [accuracy(margins[longer > 0]), accuracy(margins[longer < 0])]
        metrics["eval/accuracy_chosen_longer"], metrics["eval/accuracy_chosen_shorter"] = parts
        metrics["eval/accuracy_length_balanced"] = sum(parts) / 2
    return metrics


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


# -- shared: pairs --
def plan_pairs(
    data: PairDataset,
    pairs: list[int],
    *,
    world_size: int,
    max_tokens: int,
    packing: bool,
    prefix_sharing: bool,
) -> list[list[list[int]]]:
    """[rank][microbatch] -> pairs of `data`, whole; the same on every rank."""
    tokens = data.lengths[pairs].sum(axis=1) - prefix_sharing * data.num_shared[pairs]
    members = plan_microbatches(
        tokens.tolist(), world_size=world_size, max_tokens=max_tokens, packing=packing
    )
    return [[[pairs[m] for m in row] for row in of_rank] for of_rank in members]


def pack_pairs(data: PairDataset, pairs: list[int], *, prefix_sharing: bool) -> PackedRow:
    """One row of whole pairs: sequence 2p is the chosen, 2p + 1 the rejected side of pair p."""
    rows = [data[p] for p in pairs]
    sides = [side for row in rows for side in (row.chosen, row.rejected)]
    return pack(
        [2 * p + side for p in pairs for side in (0, 1)],
        [side.input_ids for side in sides],
        [side.loss_mask for side in sides],
        shared=[n for row in rows for n in (0, row.num_shared)] if prefix_sharing else None,
    )


TIE = 1e-5
"""differences up to this are rounding: such a pair is neither right nor wrong"""


def wins_and_ties(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Number of pairs in the right order, and of ties, from (pairs,) differences."""
    return (margins > TIE).double().sum(), (margins.abs() <= TIE).double().sum()


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


FOR_SCORING = True
"""pairs are whole conversations, as classifiers read them, without targets"""


# -- shared: load pairs --
def load(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    flag: str,
    *,
    limit: int | None = None,
) -> PairDataset:
    """Pairs of a flag; prints what they are and what was dropped.

    Rank 0 tokenises, or finds the result of an earlier run; the others get it.  # collective
    """
    dataset, report = load_pairs(
        list(getattr(args, flag.removeprefix("--"))),
        tokenizer,
        max_tokens=args.max_sequence_tokens,
        for_scoring=FOR_SCORING,
        system_prompt=args.system_prompt,
        prompt_format=args.prompt_format,
        overlong=args.overlong,
        template_kwargs=args.template_args,
        stop_ids=stop_ids,
        cache_dir=None if args.cache_dir is None else Path(args.cache_dir),
        limit=limit,
        split=args.dataset_split if flag == "--dataset" else args.eval_split,
        flag=flag,
    )
    if os.environ.get("RANK", "0") == "0":
        print(report, flush=True)
    return dataset


# -- end shared --


# -- shared: preview --
def preview(args: Args) -> None:
    """Print pairs as the model sees them; leaves nothing behind."""
    tokenizer = load_tokenizer(args.model, chat_template=args.chat_template)
    stop_ids = stop_token_ids(tokenizer, load_generation_config(args.model), args.template_args)
    dataset = load(args, tokenizer, stop_ids, "--dataset", limit=args.preview)
    for number, row in enumerate(dataset, start=1):
        lengths = [len(side.input_ids) for side in (row.chosen, row.rejected)]
        print(f"\n---- pair {number}: {lengths[0]} and {lengths[1]} tokens")
        print(render_pair(row, tokenizer, max_chars=100_000, color=sys.stdout.isatty()))


# -- end shared --


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
    pad_token = choose_pad_token(tokenizer, stop_ids)

    # ---- [2] data ----
    dataset = load(args, tokenizer, stop_ids, "--dataset")
    if dataset.num_margins:
        print0(f"the data's margins are {'' if args.use_margin else 'not '}used (--use_margin)")
    print0(f"first pair: {render_pair(dataset[0], tokenizer)}")
    eval_dataset = center_dataset = None
    if args.eval_dataset:
        eval_dataset = load(args, tokenizer, stop_ids, "--eval_dataset")
        print0(overlap_report(dataset, eval_dataset) or "no evaluation prompt occurs in training")
    if args.center_dataset:
        center_dataset = load(args, tokenizer, stop_ids, "--center_dataset")
    sizes = tuple(dataset.source_sizes)
    if args.dataset_weights is not None:
        print0(describe_mixture(args.dataset, sizes, args.dataset_weights, args.seed))
    if args.num_epochs is not None:
        num_steps = math.ceil(args.num_epochs * len(dataset) / args.pairs_per_step)
        args = replace(args, num_steps=num_steps)

    # ---- [3] models and optimizer ----
    datasets = [data for data in (dataset, eval_dataset, center_dataset) if data is not None]
    largest_id = max(data.largest_id for data in datasets)
    model = load_model(
        args.model,
        env,
        head="score",
        new_head="normal",
        dtype=dtype,
        activation_checkpointing=args.activation_checkpointing,
        cpu_offload=args.cpu_offload,
        compile=args.compile,
        lora=args.lora,
        seed=args.seed,
    )
    check_fits(model, args.model, max_tokens=args.max_sequence_tokens, largest_id=largest_id)
    if getattr(model.config, "score_bias", None) is not None and center_dataset is None:
        print0("the starting model's score_bias is dropped: --center_dataset finds a new one")

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

    # -- shared: plan --
    def plan(data: PairDataset, pairs: list[int]) -> list[list[list[int]]]:
        """[rank][microbatch] -> pairs of `data`; the same on every rank."""
        return plan_pairs(
            data,
            pairs,
            world_size=env.world_size,
            max_tokens=args.max_tokens_per_microbatch,
            packing=args.packing,
            prefix_sharing=args.prefix_sharing,
        )

    # -- end shared --

    def pair_scores(row: PackedRow) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and the rejected sides of a row, (pairs,) f32 each."""
        scores = compute_scores(model, row)
        return scores[0::2], scores[1::2]

    @torch.no_grad()
    def score_all(data: PairDataset) -> np.ndarray:
        """(P, 2) f64 scores of chosen and rejected, on every rank.  # collective: all ranks"""
        scores = torch.zeros(len(data), 2, dtype=torch.float64)
        for pairs in plan(data, list(range(len(data))))[env.rank]:
            row = pack_pairs(data, pairs, prefix_sharing=args.prefix_sharing).to(env.device)
            scores[pairs] = torch.stack(pair_scores(row), dim=1).double().cpu()
        dist.all_reduce(scores)  # collective: all ranks; each holds its own pairs
        return scores.numpy()

    def evaluate(data: PairDataset) -> dict[str, float]:
        """Metrics of the held-out pairs, each counted once."""
        start = time.perf_counter()
        scores = score_all(data)
        loss = bradley_terry_loss(
            torch.from_numpy(scores[:, 0]),
            torch.from_numpy(scores[:, 1]),
            torch.from_numpy(data.margins * args.use_margin),
            label_smoothing=args.label_smoothing,
            center_coef=args.center_coef,
        )
        return {
            "eval/loss": loss.mean().item(),
            **score_metrics(scores, data.response_lengths, data.grades),
            "time/eval_s": time.perf_counter() - start,
        }

    # ---- [5] train loop ----
    tracker = Tracker(
        output_dir,
        asdict(args) | {"world_size": env.world_size, "resolved_dtype": str(dtype)},
        enabled=env.rank == 0,
        total_steps=args.num_steps,
        columns={
            "loss": "reward/loss",
            "accuracy": "reward/accuracy",
            "margin": "reward/margin",
            "eval": "eval/accuracy",
            "balanced": "eval/accuracy_length_balanced",
            "grad": "optim/grad_norm",
            "lr": "optim/learning_rate",
            "s": "time/step_s",
            "pairs/s": "time/pairs_per_s",
        },
        wandb_project=args.wandb_project,
        wandb_name=args.wandb_name,
        source=__file__,
    )
    if eval_dataset is not None:
        tracker.log(0, evaluate(eval_dataset))
    # (P,) tokens of each pair in a packed row
    tokens = dataset.lengths.sum(axis=1) - args.prefix_sharing * dataset.num_shared
    for step in range(1, args.num_steps + 1):
        step_start = time.perf_counter()
        tracker.phase("training")

        # (a) next batch: the same on every rank, each packs its share
        pairs = batch_indices(
            step,
            sizes=sizes,
            weights=args.dataset_weights,
            rows_per_step=args.pairs_per_step,
            seed=args.seed,
        )
        microbatches = plan(dataset, pairs)

        # (e) update: one optimizer step; [D1] a mean over its pairs
        loss_sum = torch.zeros((), dtype=torch.float64, device=env.device)
        score_parts: list[Tensor] = []
        for members in microbatches[env.rank]:
            row = pack_pairs(dataset, members, prefix_sharing=args.prefix_sharing).to(env.device)
            chosen, rejected = pair_scores(row)
            margins = torch.from_numpy(dataset.margins[members] * args.use_margin)  # [D2]
            loss = bradley_terry_loss(
                chosen,
                rejected,
                margins.to(chosen),
                label_smoothing=args.label_smoothing,
                center_coef=args.center_coef,
            ).sum() / len(pairs)  # FSDP sums gradients over ranks
            loss.backward()
            loss_sum += loss.detach()
            score_parts.append(torch.stack([chosen.detach(), rejected.detach()], dim=1).double())
        grad_norm = clip_grad_norm(model, args.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step}: gradient norm is {grad_norm}; no update was made")
        optimizer.step()
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()

        # (g) log: everything reduced over ranks once
        scores = torch.cat(score_parts)  # (this rank's pairs, 2)
        counts = wins_and_ties(scores[:, 0] - scores[:, 1])
        totals = torch.stack([loss_sum, *counts, *scores.sum(0)]).cpu()
        dist.all_reduce(totals)  # collective: all ranks
        mean = (totals[1:] / len(pairs)).tolist()
        num_tokens = int(tokens[pairs].sum())
        step_s = time.perf_counter() - step_start
        metrics = {
            "reward/loss": totals[0].item(),
            "reward/accuracy": mean[0],
            "reward/ties": mean[1],
            "reward/margin": mean[2] - mean[3],
            "reward/chosen_score": mean[2],
            "reward/rejected_score": mean[3],
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": learning_rate,
            "data/epoch": step * args.pairs_per_step / len(dataset),
            "data/tokens": num_tokens,
            "data/shared_tokens": int(dataset.lengths[pairs].sum()) - num_tokens,
            "data/padding": 1 - num_tokens / token_slots(microbatches, tokens),
            "time/step_s": step_s,
            "time/pairs_per_s": len(pairs) / step_s,
            "time/tokens_per_s": num_tokens / step_s,
            "memory/peak_gb": peak_memory_gb(env.device),
        }

        # (h) eval
        last = step == args.num_steps
        if eval_dataset is not None and (last or step % args.eval_every_steps == 0):
            metrics |= evaluate(eval_dataset)
        tracker.log(step, metrics)

    # ---- [6] teardown ----
    score_bias = None
    if center_dataset is not None:  # [D3]
        score_bias = -float(score_all(center_dataset)[:, 0].mean())
        print0(f"score_bias: {score_bias:.4f}, in config.json; --rewards model:PATH adds it")
    tracker.phase("saving")
    tokenizer.pad_token = pad_token
    # Whoever loads it must write conversations as here.
    if args.prompt_format == "text" or dataset.whole_texts.all():
        tokenizer.chat_template = None
    elif tokenizer.chat_template:
        settings = [f"{{%- set {name} = {v!r} %}}" for name, v in args.template_args.items()]
        tokenizer.chat_template = "".join([*settings, str(tokenizer.chat_template)])
        if dataset.whole_texts.any():
            print0("pairs of whole texts were trained as they are; `final` has a chat template")
    export_hf(
        model,
        tokenizer,
        stream_full_tensors(model, dtype=getattr(torch, args.export_dtype)),
        path=output_dir / "final",
        source=args.model,
        stop_token_ids=stop_ids,
        score_bias=score_bias,
    )
    if args.lora_rank is not None:  # `final` has the adapters merged in; here they are alone
        export_adapter(model, path=output_dir / "adapter", source=args.model)
    tracker.finish()
    print0(f"final checkpoint: {output_dir / 'final'}")
    shutdown()


if __name__ == "__main__":
    main(parse_args(Args))
