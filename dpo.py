"""DPO: Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) and the
losses that grew from it: IPO, hinge (SLiC), robust DPO, SimPO, KTO on pairs; with the SFT term of
RPO, label smoothing (cDPO) and length normalisation.

With the log-ratio r(y) = sum over the tokens of y of log pi(token) - log pi_ref(token), the
implicit reward is beta r(y), and the sigmoid loss of a pair - log sigmoid(beta (r(chosen) -
r(rejected))). `preference_loss` has the others.

Deviations from the papers:
[D1] losses are averaged over the pairs of the optimizer step, the SFT term over its chosen tokens,
     on all ranks; RPO (arXiv:2404.19733) divides each response by its own length.
[D2] IPO compares means over tokens, not sums: with sums its target margin 1 / (2 beta) does not
     fit responses of different lengths (its authors agree: trl#1265). --length_normalise False
     gives the paper's form.
[D3] kto_pair takes its KL baselines, without gradient, from the whole optimizer step before the
     update, so that they do not depend on microbatches; KTO (arXiv:2402.01306) pairs prompts with
     the responses of others to estimate them.
[D4] SimPO has no reference model; what is logged as its reward is beta times the mean log-prob.

Launch:
    python dpo.py --model M --dataset pairs.jsonl --output_dir runs/dpo --num_steps 100
    torchrun --standalone --nproc-per-node 8 dpo.py ...same flags...
Expected result: tests/test_preference_learning.py (toy pairs, two CPU cores).

P pairs of a step, T packed tokens of a row, S = 2P sequences.
"""

import common  # noqa: F401  isort: skip  (first: sets the environment for torch and vLLM)

import hashlib
import json
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.cache import load_arrays, save_arrays, share_arrays
from common.data import PromptRow, load_prompts, stop_token_ids
from common.dist import all_gather_objects, from_rank0, parse_args, print0, setup, shutdown
from common.engine import Engine, build_engine
from common.logprobs import compute_logprobs
from common.lora import LoraSettings, adapters_off
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
from common.pairs import PairDataset, load_pairs, overlap_report, render_pair
from common.rewards import (
    MODEL,
    RewardScorer,
    combine_rewards,
    reward_labels,
    reward_weights,
    validate_golds,
)
from common.scoring import RewardModel
from common.tracking import Tracker, prepare_output_dir
from common.weight_sync import WeightSync, stream_full_tensors


@tyro.conf.configure(tyro.conf.FlagConversionOff)
@dataclass
class Args:
    """Train a language model on preference pairs, without a reward model."""

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
    learning_rate: float = 5e-7
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """after the warm-up; wsd: constant, then linear decay at the end"""
    warmup_ratio: float = 0.1
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
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "kto_pair"] = "sigmoid"
    """see `preference_loss`"""
    beta: float = 0.1
    """how strongly the policy is held to the reference (ipo: tau); simpo wants 2 or more"""
    label_smoothing: float = 0.0
    """chance that a label is wrong, below 0.5 (sigmoid: cDPO; robust; simpo)"""
    length_normalise: bool | None = None
    """log-ratios are means over the response's tokens, not sums; None: for ipo and simpo [D2]"""
    simpo_gamma: float = 0.5
    """simpo: by how much the chosen reward must exceed the rejected one"""
    sft_coef: float = 0.0
    """weight of the chosen responses' negative log-likelihood per token (RPO)"""
    reference: Literal["cached", "live"] = "cached"
    """reference log-probs are computed once before training and kept in cache_dir, or at every
    step: by a frozen copy, with LoRA by the model without its adapters (simpo: by none)"""
    ref_model: str | None = None
    """folder or hub name of another reference than the starting model, with the same tokenizer"""

    # evaluation
    eval_dataset: tuple[str, ...] = ()
    """held-out pairs in the same formats; every pair is counted exactly once"""
    eval_split: str = "test"
    """like dataset_split"""
    eval_every_steps: int = 50
    """also before the first and after the last step"""
    online_dataset: tuple[str, ...] = ()
    """held-out prompts (pairs will do): responses that the engine samples are scored by --rewards
    and compared with those of the starting model"""
    online_every_steps: int = 50
    """also before the first and after the last step"""
    online_max_prompts: int | None = None
    """use only the first so many rows"""
    online_temperature: float = 0.0
    """0 is greedy"""
    max_prompt_tokens: int = 1024
    """longer prompts of online_dataset are dropped and counted"""
    max_response_tokens: int = 512
    """sampling stops here"""

    # -- shared: reward args --
    # rewards
    rewards: tuple[str, ...] = ()
    """math, exact, path/to/file.py:function, or model:PATH (a reward model, kept sharded over the
    ranks beside the others); several are added up"""
    reward_weights: tuple[float, ...] | None = None
    """one factor per reward, in their order; all 1 by default; 0 only measures a reward"""
    reward_timeout_s: float = 30.0
    """seconds for one call: of a function that takes a batch, or of one sample; a late batch is
    tried again sample by sample; what is late then stays unscored, and the worker is restarted"""
    reward_workers: int = 1
    """worker processes per rank"""
    max_reward_failures: float = 0.5
    """stop when a larger share of a step's samples raised or timed out (a returned None is fine)"""
    offload_frozen: bool = False
    """GPU only: reference and reward models in host memory, but for the layers at work; slower"""
    # -- end shared --

    # -- shared: engine args --
    # engine
    engine: Literal["vllm", "transformers"] = "vllm"
    """transformers: slower, for machines that vLLM does not support"""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the trainer's compute dtype"""
    engine_tensor_parallel: int = 1
    """neighbouring ranks that share one engine; must divide the ranks (vllm only)"""
    engine_max_sequences: int = 256
    """sequences an engine decodes at once (per rank)"""
    engine_gpu_memory: float = 0.4
    """share of GPU memory for the engine's weights and KV cache (per rank)"""
    engine_kv_cache_gb: float = 0.5
    """CPU only: KV cache in GiB (per rank); sequences that do not fit wait"""
    sync_bucket_mb: int = 256
    """MiB of weights gathered at a time when the engine is updated (per rank)"""
    # -- end shared --

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
    def means_over_tokens(self) -> bool:
        """length_normalise, decided"""
        if self.length_normalise is None:
            return self.loss in ("ipo", "simpo")
        return self.length_normalise

    @property
    def inputs(self) -> tuple[str, ...]:
        """models and data that the run reads, and must not overwrite"""
        data = (*self.dataset, *self.eval_dataset, *self.online_dataset)
        return (self.model, self.ref_model or self.model, *self.rewards, *data)

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
        for name in ("simpo_gamma", "sft_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
        if not 0 < self.beta < math.inf:
            raise ValueError(f"--beta={self.beta} must be positive and finite")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("--loss=robust needs --label_smoothing, the share of wrong labels")
        if self.label_smoothing and self.loss not in ("sigmoid", "robust", "simpo"):
            raise ValueError(
                f"--label_smoothing={self.label_smoothing}: --loss={self.loss} has no smoothing"
            )
        if self.ref_model is not None and self.loss == "simpo":
            raise ValueError(f"--ref_model={self.ref_model}: --loss=simpo uses no reference")
        for name in ("online_every_steps", "max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive")
        if self.online_max_prompts is not None and self.online_max_prompts < 1:
            raise ValueError(
                f"--online_max_prompts={self.online_max_prompts} must be positive, or None"
            )
        if not 0 <= self.online_temperature < math.inf:
            raise ValueError(
                f"--online_temperature={self.online_temperature} must be finite and not negative"
            )
        if bool(self.rewards) != bool(self.online_dataset):
            raise ValueError(
                f"--rewards={' '.join(self.rewards)} and "
                f"--online_dataset={' '.join(self.online_dataset)} need each other"
            )
        if (
            self.online_dataset
            and self.max_prompt_tokens + self.max_response_tokens > self.max_sequence_tokens
        ):
            raise ValueError(
                f"--max_prompt_tokens={self.max_prompt_tokens} plus "
                f"--max_response_tokens={self.max_response_tokens} exceed "
                f"--max_sequence_tokens={self.max_sequence_tokens}"
            )
        # -- shared: reward and engine check --
        for name in (
            *("reward_timeout_s", "reward_workers", "engine_tensor_parallel"),
            *("engine_max_sequences", "engine_kv_cache_gb", "sync_bucket_mb"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive and finite")
        if not 0 <= self.max_reward_failures < math.inf:
            raise ValueError(
                f"--max_reward_failures={self.max_reward_failures} must be finite and not negative"
            )
        if not 0 < self.engine_gpu_memory <= 1:
            raise ValueError(f"--engine_gpu_memory={self.engine_gpu_memory} must be in (0, 1]")
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if world_size % self.engine_tensor_parallel:
            raise ValueError(
                f"--engine_tensor_parallel={self.engine_tensor_parallel} must divide the number "
                f"of ranks, {world_size}"
            )
        _ = reward_weights(self.rewards, self.reward_weights)  # checks both
        # -- end shared --
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


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    loss: str,
    beta: float,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0,
    chosen_kl: float = 0.0,
    rejected_kl: float = 0.0,
) -> Tensor:
    """Loss of each pair from the log-ratios r of its responses.

    With d = beta (r(chosen) - r(rejected)) and e = label_smoothing:

        sigmoid   - (1 - e) log s(d) - e log s(-d)      DPO; e > 0: cDPO (Mitchell 2023)
        robust    (- (1 - e) log s(d) + e log s(-d)) / (1 - 2 e)             arXiv:2403.00409
        hinge     max(0, 1 - d)                                              arXiv:2309.06657
        ipo       (r(chosen) - r(rejected) - 1 / (2 beta))^2                 arXiv:2310.12036
        simpo     sigmoid with d - gamma for d                               arXiv:2405.14734
        kto_pair  2 - s(beta (r(chosen) - kl(rejected))) - s(beta (kl(chosen) - r(rejected)))

    A loss of your own needs its name in `Args.loss` and its line here; `Args.means_over_tokens` and
    the check of --label_smoothing know which losses want means and have smoothing.

    Args:
        chosen, rejected: (P,) float, sums or means over the tokens of the response of log pi -
            log pi_ref (simpo: of log pi); gradients flow into both.
        chosen_kl, rejected_kl: kto_pair's baselines, mean log-ratios of a whole step, at least 0.

    Returns:
        (P,)
    """
    d = beta * (chosen - rejected)
    if loss == "hinge":
        return (1 - d).relu()
    if loss == "ipo":
        return (chosen - rejected - 1 / (2 * beta)).square()
    if loss == "kto_pair":
        desired, undesired = beta * (chosen - rejected_kl), beta * (chosen_kl - rejected)
        return (1 - desired.sigmoid()) + (1 - undesired.sigmoid())
    if loss == "robust":
        clean = (1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
        return -clean / (1 - 2 * label_smoothing)
    if loss == "simpo":
        d = d - simpo_gamma
    return -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)


def log_ratios(row: PackedRow, log_ratio: Tensor, *, means: bool) -> tuple[Tensor, Tensor]:
    """Per token -> per response, of the chosen and the rejected sides of a row of pairs.

    Args:
        row: from `pack_pairs`.
        log_ratio: (T,) f32, 0 outside the response_mask.
        means: over the trained tokens of a response, not sums.

    Returns:
        chosen, rejected: (pairs,) f64 each.
    """
    ratios = row.sum_sequences(log_ratio)
    if means:
        ratios = ratios / torch.tensor(row.response_lengths, device=ratios.device)
    return ratios[0::2], ratios[1::2]


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


# -- shared: rollout --
def request_seed(*stream: int) -> int:
    """Seed of one sampling request, from (run seed, purpose, step, prompt, sample)."""
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint32)[0])


@dataclass
class Rollouts:
    """All samples of a step, the same on every rank, ordered by prompt, then by sample."""

    rows: list[PromptRow]  # S rows, each repeated for its samples
    response_ids: list[list[int]]  # S lists, stop token included
    rollout_logprobs: list[list[float]]  # S lists, from the engine at sampling time
    truncated: Tensor  # (S,) bool
    scores: Tensor  # (S,) f64, NaN where there is none
    components: dict[str, Tensor]  # the single rewards by their labels, (S,) f64 each
    responses: list[str]
    exceptions: int
    timeouts: int
    refused: int  # (sample, reward model) pairs without a score
    rollout_s: float
    reward_s: float

    @property
    def response_lengths(self) -> Tensor:
        """(S,) i32 sampled tokens"""
        return torch.tensor([len(ids) for ids in self.response_ids], dtype=torch.int32)

    def dump(self, advantages: Tensor | None = None) -> Iterator[dict[str, Any]]:
        """One JSON object per sample, for the rollouts folder."""

        def number(value: Tensor) -> float | None:
            return value.item() if value.isfinite() else None  # JSON has no NaN

        for s, row in enumerate(self.rows):
            rewards = {name: number(values[s]) for name, values in self.components.items()}
            yield {
                "prompt": row.prompt,
                "response": self.responses[s],
                "score": number(self.scores[s]),
                "rewards": rewards,
                "advantage": None if advantages is None else number(advantages[s]),
                "truncated": bool(self.truncated[s]),
                "columns": row.columns,
                "prompt_ids": row.prompt_ids,
                "response_ids": self.response_ids[s],
                "rollout_logprobs": self.rollout_logprobs[s],
            }


def rollout(
    rows: list[PromptRow],
    engine: Engine,
    scorer: RewardScorer,
    reward_models: dict[str, RewardModel],
    tokenizer: PreTrainedTokenizerBase,
    *,
    stream: tuple[int, ...],
    tensor_parallel: int,
    samples_per_prompt: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop_ids: list[int],
    weights: dict[str, float],
    max_failures: float,
    on_progress: Callable[[int, int], None],
) -> Rollouts:
    """Sample and score `samples_per_prompt` responses to every row.  # collective: all ranks

    The ranks of one tensor-parallel engine get the same requests; engines share the prompts out.
    A request's seed depends on its place in the step alone, so samples do not depend on the ranks.
    Reward functions score where the samples are, reward models on all ranks together. `weights` has
    the names of both.
    """
    num_engines = dist.get_world_size() // tensor_parallel
    mine = [
        (prompt, number)
        for prompt in range(dist.get_rank() // tensor_parallel, len(rows), num_engines)
        for number in range(samples_per_prompt)
    ]
    start = time.perf_counter()
    completions = engine.generate(
        [rows[prompt].prompt_ids for prompt, _ in mine],
        [request_seed(*stream, prompt, number) for prompt, number in mine],
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=stop_ids,
        on_progress=lambda done: on_progress(done, len(mine)),
    )
    rollout_s = time.perf_counter() - start

    start = time.perf_counter()
    local = None
    if dist.get_rank() % tensor_parallel == 0:  # the others hold the same completions
        texts = [
            str(tokenizer.decode(c.response_ids, skip_special_tokens=True)) for c in completions
        ]
        batch = scorer.score(
            [rows[prompt].prompt for prompt, _ in mine],
            texts,
            [rows[prompt].columns for prompt, _ in mine],
        )
        local = (mine, completions, texts, batch)
    reward_s = time.perf_counter() - start

    # Every rank gets every sample: advantages, minibatches and token counts are then plain
    # local arithmetic, identical on all ranks. 8 bytes a token, once per step.
    place = {}
    exceptions = timeouts = 0
    first_traceback = None
    for part in all_gather_objects(local):
        if part is None:
            continue
        keys, part_completions, part_texts, batch = part
        exceptions, timeouts = exceptions + batch.exceptions, timeouts + batch.timeouts
        first_traceback = first_traceback or batch.first_traceback
        for i, key in enumerate(keys):
            values = {name: of_batch[i] for name, of_batch in batch.components.items()}
            place[key] = (part_completions[i], part_texts[i], values, batch.failed[i])
    ordered = [place[key] for key in sorted(place)]
    responses = [item[1] for item in ordered]
    failed = [item[3] for item in ordered]
    if sum(failed) > max_failures * len(ordered):
        raise ValueError(
            f"--rewards failed on {sum(failed)} of {len(ordered)} samples ({exceptions} "
            f"exceptions, {timeouts} time-outs), more than --max_reward_failures={max_failures} "
            f"allows. The first:\n{first_traceback or 'a time-out (--reward_timeout_s)'}"
        )

    start = time.perf_counter()
    sample_rows = [row for row in rows for _ in range(samples_per_prompt)]
    components = {name: [item[2][name] for item in ordered] for name in scorer.names}
    refused = 0
    lost = failed  # without one of its parts, a sum cannot be compared to those of other samples
    for name, reward_model in reward_models.items():
        components[name] = reward_model.score(
            [row.prompt for row in sample_rows],
            responses,
            [row.tools for row in sample_rows],
        )
        refused += components[name].count(None)
        lost = [a or b is None for a, b in zip(lost, components[name], strict=True)]
    reward_s += time.perf_counter() - start

    def as_tensor(values: list[float | None]) -> Tensor:
        return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)

    labels = reward_labels(list(weights))
    return Rollouts(
        rows=sample_rows,
        response_ids=[item[0].response_ids for item in ordered],
        rollout_logprobs=[item[0].rollout_logprobs for item in ordered],
        truncated=torch.tensor([item[0].truncated for item in ordered]),
        scores=as_tensor(combine_rewards(components, weights, lost)),
        components={labels[name]: as_tensor(components[name]) for name in weights},
        responses=responses,
        exceptions=exceptions,
        timeouts=timeouts,
        refused=refused,
        rollout_s=rollout_s,
        reward_s=reward_s,
    )


# -- end shared --


# -- shared: memory --
def peak_memory_gb(device: torch.device) -> float:
    """Peak of this rank in GiB: allocated GPU memory, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- end shared --


# ---- data: what forks change first ----

MAX_GAP_FP32 = 1e-3
"""self-test, float32: largest difference of a token's reference log-prob; a healthy run has 1e-5"""
MEAN_GAP_BF16 = 0.15
"""self-test, bfloat16: mean difference; the same numbers are rounded otherwise in other rows"""


FOR_SCORING = False
"""pairs are what an engine would sample, with the tokens of the responses as targets"""


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


class Reference:
    """Reference log-probs of all targets of a dataset, one number per target token.

    Args:
        data: the pairs.
        values: (N,) f32; by pair, in it chosen before rejected, in it by position; NaN where
            none was asked for.
    """

    def __init__(self, data: PairDataset, values: np.ndarray) -> None:
        self.values = values
        self.starts = np.concatenate([[0], np.cumsum(data.num_targets.ravel())])

    def __call__(self, row: PackedRow) -> Tensor:
        """(T,) f32 of a row from `pack_pairs`, 0 outside its response_mask."""
        parts = [np.array(self.values[self.span(s)]) for s in row.sequence_ids]
        return row.lay_out([torch.from_numpy(part) for part in parts])

    def span(self, sequence: int) -> slice:
        """Where the values of a sequence are."""
        return slice(self.starts[sequence], self.starts[sequence + 1])


def model_key(model: PreTrainedModel, *about: str) -> str:
    """Changes whenever a model's log-probs can: a hash of the weights themselves, the config, and
    the code and libraries that compute.  # collective: all ranks; rank 0 has the key
    """
    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    about += (torch.__version__, version("transformers"))
    about += (json.dumps(config, sort_keys=True, default=str),)
    digest = hashlib.sha256("\0".join(about).encode())
    for name, weight in stream_full_tensors(model, dtype=torch.float32):
        if dist.get_rank() == 0:
            digest.update(name.encode())
            digest.update(weight.cpu().contiguous().numpy().data)
    root = Path(__file__).parent
    for name in (
        "common/logprobs.py",
        "common/model.py",
        "common/packing.py",
        "kernels/logprob.py",
    ):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def reference_key(of_model: str, data: PairDataset, wanted: list[int]) -> str:
    """Changes whenever reference log-probs can: with the model, any token id or mask, or the pairs
    that are wanted. `of_model` is from `model_key`.
    """
    digest = hashlib.sha256(of_model.encode())
    sides = data.sides
    arrays = (sides.input_ids, sides.loss_mask, sides.offsets, data.num_shared, np.array(wanted))
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


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
    # -- shared: reward functions --
    scorer = RewardScorer(
        [name for name in args.rewards if not name.startswith(MODEL)],
        timeout_s=args.reward_timeout_s,
        num_workers=args.reward_workers,
    )
    # -- end shared --

    # ---- [2] data ----
    dataset = load(args, tokenizer, stop_ids, "--dataset")
    if args.loss == "simpo" and args.beta < 1:
        print0(f"--beta={args.beta}: SimPO's authors use 2 to 10")
    if dataset.num_margins:
        print0("the data's margins are not used: DPO has no term for them")
    print0(f"first pair, trained tokens marked: {render_pair(dataset[0], tokenizer)}")
    eval_dataset = None
    if args.eval_dataset:
        eval_dataset = load(args, tokenizer, stop_ids, "--eval_dataset")
        print0(overlap_report(dataset, eval_dataset) or "no evaluation prompt occurs in training")
    online_rows: list[PromptRow] = []
    if args.online_dataset:
        online_rows, report = load_prompts(
            list(args.online_dataset),
            tokenizer,
            max_prompt_tokens=args.max_prompt_tokens,
            system_prompt=args.system_prompt,
            prompt_format=args.prompt_format,
            template_kwargs=args.template_args,
            split=args.eval_split,
            flag="--online_dataset",
        )
        online_rows, unverifiable = validate_golds(args.rewards, online_rows)
        print0(report)
        if unverifiable:
            print0(f"  of these the rewards cannot use {unverifiable}; {len(online_rows)} remain")
        online_rows = online_rows[: args.online_max_prompts]
        scorer.wait_ready()  # a reward file that does not import ends the run here
    sizes = tuple(dataset.source_sizes)
    if args.dataset_weights is not None:
        print0(describe_mixture(args.dataset, sizes, args.dataset_weights, args.seed))
    if args.num_epochs is not None:
        num_steps = math.ceil(args.num_epochs * len(dataset) / args.pairs_per_step)
        args = replace(args, num_steps=num_steps)

    def batch(step: int) -> list[int]:
        """Pairs of a step, the same on every rank."""
        return batch_indices(
            step,
            sizes=sizes,
            weights=args.dataset_weights,
            rows_per_step=args.pairs_per_step,
            seed=args.seed,
        )

    datasets = {"train": dataset} | ({} if eval_dataset is None else {"eval": eval_dataset})
    pairs_of = {name: list(range(len(data))) for name, data in datasets.items()}
    if args.num_steps * args.pairs_per_step < len(dataset):  # only those that the run will see
        pairs_of["train"] = sorted({p for i in range(args.num_steps) for p in batch(i + 1)})
    if args.ref_model is not None:
        used = np.unique(
            [i for d in datasets.values() for i in np.unique(d.sides.input_ids)]
        ).tolist()
        theirs = load_tokenizer(args.ref_model, flag="--ref_model")
        if theirs.convert_ids_to_tokens(used) != tokenizer.convert_ids_to_tokens(used):
            raise ValueError(
                f"--ref_model={args.ref_model}: its tokenizer gives the token ids of "
                f"--model={args.model} another meaning"
            )

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

    def pack_row(data: PairDataset, members: list[int]) -> PackedRow:
        """A microbatch of a plan, on the device."""
        return pack_pairs(data, members, prefix_sharing=args.prefix_sharing).to(env.device)

    # ---- [3] models and optimizer ----
    @torch.no_grad()
    def self_test(
        policy: PreTrainedModel, reference: Callable[[PackedRow], Tensor], name: str
    ) -> None:
        """Refuse reference log-probs that are not those of `policy`: they would belong to other
        rows, other weights or another computation.  # collective: all ranks
        """
        gaps: list[np.ndarray] = []
        for members in plan(datasets[name], pairs_of[name][: 4 * env.world_size])[env.rank]:
            row = pack_row(datasets[name], members)
            gap = compute_logprobs(policy, row)[0] - reference(row)
            gaps.append(gap[row.response_mask].abs().cpu().numpy())
        everywhere = np.concatenate([gap for part in all_gather_objects(gaps) for gap in part])
        exact = dtype == torch.float32
        what, limit = ("largest", MAX_GAP_FP32) if exact else ("mean", MEAN_GAP_BF16)
        gap = everywhere.max() if exact else everywhere.mean()
        if not gap <= limit:
            raise RuntimeError(
                f"self-test failed: {what} gap {gap:.3g} > {limit} between the reference's "
                f"log-probs of {len(everywhere)} tokens and those that are to be used; try "
                "--cache_dir None, --reference live and --packing False to find the cause"
            )
        print0(f"self-test: reference log-probs are reproduced, {what} gap {gap:.1e}")

    @torch.no_grad()
    def cached_reference(policy: PreTrainedModel, name: str, of_model: str) -> Reference:
        """Log-probs of `policy` for a dataset, from the cache if they are there.  # collective"""
        data, wanted = datasets[name], pairs_of[name]
        folder = None
        if args.cache_dir is not None:
            key = from_rank0(lambda: reference_key(of_model, data, wanted))
            folder = Path(args.cache_dir).expanduser().resolve() / key
            arrays = (load_arrays(folder, verify=True) if env.rank == 0 else None) or ({}, {})
            if from_rank0(lambda: bool(arrays[0])):
                print0(f"reference log-probs, {name} pairs: from the cache ({folder})")
                reference = Reference(data, share_arrays(arrays[0], folder)["logprobs"])
                self_test(policy, reference, name)
                return reference
        reference = Reference(data, np.full(int(data.num_targets.sum()), np.nan, np.float32))
        start = time.perf_counter()
        for first in range(0, len(wanted), 1024):
            tracker.phase("reference log-probs", first, len(wanted))
            computed: dict[int, np.ndarray] = {}
            for members in plan(data, wanted[first : first + 1024])[env.rank]:
                row = pack_row(data, members)
                logprobs, _ = compute_logprobs(policy, row)
                parts = [part.cpu().numpy() for part in row.split(logprobs)]
                computed |= zip(row.sequence_ids, parts, strict=True)
            for of_rank in all_gather_objects(computed):  # collective: all ranks
                for sequence, values in of_rank.items():
                    reference.values[reference.span(sequence)] = values
        print0(
            f"reference log-probs, {name} pairs: {len(wanted):,} computed in "
            f"{time.perf_counter() - start:.1f} s"
        )
        if folder is not None and env.rank == 0:
            try:
                save_arrays(folder, {"logprobs": reference.values}, {})
            except OSError as error:
                print0(f"reference log-probs: not cached: {error}")
        self_test(policy, reference, name)
        return reference

    largest_id = max(data.largest_id for data in datasets.values())
    # -- shared: reward models --
    reward_models = {
        name: RewardModel(
            name.removeprefix(MODEL),
            env,
            dtype=dtype,
            max_tokens=args.max_tokens_per_microbatch,
            packing=args.packing,
            cpu_offload=args.cpu_offload or args.offload_frozen,
            system_prompt=args.system_prompt,
        )
        for name in args.rewards
        if name.startswith(MODEL)
    }
    # -- end shared --
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
    ref_model = None
    if args.ref_model is not None or (
        args.reference == "live" and args.lora_rank is None and args.loss != "simpo"
    ):
        name, flag = args.ref_model or args.model, "--ref_model" if args.ref_model else "--model"
        ref_model = load_model(
            name,
            env,
            dtype=dtype,
            trainable=False,
            cpu_offload=args.cpu_offload or args.offload_frozen,
            flag=flag,
        )
        check_fits(
            ref_model,
            name,
            max_tokens=args.max_sequence_tokens,
            largest_id=largest_id,
            flag=flag,
        )
    tracker = Tracker(
        output_dir,
        asdict(args) | {"world_size": env.world_size, "resolved_dtype": str(dtype)},
        enabled=env.rank == 0,
        total_steps=args.num_steps,
        columns={
            "loss": "policy/loss",
            "accuracy": "policy/accuracy",
            "ties": "policy/ties",
            "margin": "policy/margin",
            "eval": "eval/accuracy",
            "eval margin": "eval/margin",
            "win rate": "eval/online_win_rate",
            "grad": "optim/grad_norm",
            "lr": "optim/learning_rate",
            "s": "time/step_s",
            "pairs/s": "time/pairs_per_s",
        },
        wandb_project=args.wandb_project,
        wandb_name=args.wandb_name,
        source=__file__,
    )
    references: dict[str, Reference] = {}
    if args.reference == "cached" and args.loss != "simpo":
        # Without --ref_model no second model: before its first update the policy is the reference.
        policy = model if ref_model is None else ref_model
        of_model = ""
        if args.cache_dir is not None:
            of_model = model_key(policy, str(dtype), env.device.type)
        references = {name: cached_reference(policy, name, of_model) for name in datasets}
        del policy  # or a reference model would stay in memory
        ref_model = None

    @torch.no_grad()
    def reference_logprobs(name: str, row: PackedRow) -> Tensor:
        """(T,) f32 of a row of a dataset; zeros for simpo. [D4]  # collective if live"""
        if args.loss == "simpo":
            return torch.zeros(row.num_tokens, device=env.device)
        if args.reference == "cached":
            return references[name](row)
        if ref_model is not None:
            return compute_logprobs(ref_model, row)[0]
        with adapters_off(model):  # LoRA: the reference is the model without its adapters
            return compute_logprobs(model, row)[0]

    @torch.no_grad()
    def policy_ratios(row: PackedRow, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs (T,) f32; log-ratios of the chosen and the rejected sides, (pairs,) f64."""
        logprobs, _ = compute_logprobs(model, row)
        ratios = log_ratios(row, logprobs - ref_logprobs, means=args.means_over_tokens)
        return logprobs, *ratios

    def losses(chosen: Tensor, rejected: Tensor, kl: list[float]) -> Tensor:
        """`preference_loss` with this run's settings; `kl` of chosen and rejected."""
        return preference_loss(
            chosen,
            rejected,
            loss=args.loss,
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            simpo_gamma=args.simpo_gamma,
            chosen_kl=kl[0],
            rejected_kl=kl[1],
        )

    def evaluate(data: PairDataset) -> dict[str, float]:
        """Metrics of the held-out pairs, each counted once.  # collective: all ranks"""
        start = time.perf_counter()
        ratios = torch.zeros(len(data), 2, dtype=torch.float64)  # chosen, rejected
        nll = torch.zeros((), dtype=torch.float64)
        for members in plan(data, list(range(len(data))))[env.rank]:
            row = pack_row(data, members)
            logprobs, *parts = policy_ratios(row, reference_logprobs("eval", row))
            ratios[members] = torch.stack(parts, dim=1).cpu()
            nll -= row.sum_sequences(logprobs)[0::2].sum().cpu()
        for of_rank in (ratios, nll):
            dist.all_reduce(of_rank)  # collective: all ranks; each holds its own pairs
        kl = ratios.mean(0).clamp(min=0).tolist()
        rewards = args.beta * ratios
        wins, ties = wins_and_ties(ratios[:, 0] - ratios[:, 1])
        sft_loss = nll.item() / int(data.num_targets[:, 0].sum())
        loss = losses(ratios[:, 0], ratios[:, 1], kl).mean().item()
        return {
            "eval/loss": loss + args.sft_coef * sft_loss,  # the objective of training
            "eval/sft_loss": sft_loss,
            "eval/accuracy": wins.item() / len(data),
            "eval/ties": ties.item() / len(data),
            "eval/margin": (rewards[:, 0] - rewards[:, 1]).mean().item(),
            "eval/chosen_reward": rewards[:, 0].mean().item(),
            "eval/rejected_reward": rewards[:, 1].mean().item(),
            "time/eval_s": time.perf_counter() - start,
        }

    # ---- [4] inference engine ----
    engine = weight_sync = None
    if online_rows:
        engine_dtype = "bfloat16" if dtype == torch.bfloat16 else "float32"
        engine = build_engine(
            args.model,
            backend=args.engine,
            dtype=engine_dtype if args.engine_dtype == "auto" else args.engine_dtype,
            max_model_len=args.max_prompt_tokens + args.max_response_tokens,
            max_num_seqs=args.engine_max_sequences,
            tensor_parallel=args.engine_tensor_parallel,
            seed=args.seed,
            kv_cache_bytes=int(args.engine_kv_cache_gb * 2**30),
            gpu_memory_utilization=args.engine_gpu_memory,
            device=env.device,
        )
        weight_sync = WeightSync(model, engine, bucket_bytes=args.sync_bucket_mb * 2**20)

    def evaluate_online(step: int, baseline: Tensor | None) -> tuple[dict[str, float], Tensor]:
        """Metrics and scores of the policy's responses to the held-out prompts; the same random
        streams every time. `baseline` has the starting model's scores.  # collective: all ranks
        """
        assert engine is not None and weight_sync is not None
        start = time.perf_counter()
        engine.wake_weights()
        weight_sync.sync()
        engine.wake_kv_cache()
        samples = rollout(
            online_rows,
            engine,
            scorer,
            reward_models,
            tokenizer,
            stream=(args.seed,),
            tensor_parallel=args.engine_tensor_parallel,
            samples_per_prompt=1,
            max_tokens=args.max_response_tokens,
            temperature=args.online_temperature,
            top_p=1.0,
            stop_ids=stop_ids,
            weights=reward_weights(args.rewards, args.reward_weights),
            max_failures=args.max_reward_failures,
            on_progress=lambda done, total: tracker.phase("online evaluation", done, total),
        )
        engine.sleep()
        tracker.dump_samples(f"online_{step}", samples.dump())
        metrics = {
            "eval/online_reward": samples.scores.nanmean().item(),
            "eval/online_unscored": samples.scores.isnan().double().mean().item(),
            "eval/online_response_tokens": samples.response_lengths.double().mean().item(),
            "eval/online_truncated": samples.truncated.double().mean().item(),
            "time/online_s": time.perf_counter() - start,
        }
        for name, values in samples.components.items():
            metrics[f"eval/online_reward/{name}"] = values.nanmean().item()
        if baseline is not None:
            # A response without a score (empty, refused, not gradable) loses against any with one.
            scores, before = (s.nan_to_num(nan=-1e30) for s in (samples.scores, baseline))
            wins, ties = wins_and_ties(scores - before)
            metrics["eval/online_win_rate"] = (wins + 0.5 * ties).item() / len(scores)
        return metrics, samples.scores

    # ---- [5] train loop ----
    if args.reference == "live" and args.loss != "simpo" and args.ref_model is None:
        with torch.no_grad():  # before its first update the policy is the reference
            self_test(model, lambda row: reference_logprobs("train", row), "train")
    before, baseline = {}, None
    if eval_dataset is not None:
        before |= evaluate(eval_dataset)
    if online_rows:
        online, baseline = evaluate_online(0, None)
        before |= online
    if before:
        tracker.log(0, before)
    # (P,) tokens of each pair in a packed row
    tokens = dataset.lengths.sum(axis=1) - args.prefix_sharing * dataset.num_shared
    for step in range(1, args.num_steps + 1):
        step_start = time.perf_counter()
        tracker.phase("training")

        # (a) next batch: the same on every rank, each packs its share
        pairs = batch(step)
        microbatches = plan(dataset, pairs)
        rows = [pack_row(dataset, members) for members in microbatches[env.rank]]
        # Counted once, before the first backward, over all ranks and microbatches.
        num_tokens = dataset.num_targets[pairs].sum(0)  # (2,) of chosen and rejected

        # (c) reference log-probs; kto_pair: also the baselines of the whole step
        ref_logprobs = [reference_logprobs("train", row) for row in rows]  # (T,) f32 each
        kl = torch.zeros(2, dtype=torch.float64)
        if args.loss == "kto_pair":  # [D3]
            for row, reference in zip(rows, ref_logprobs, strict=True):
                kl += torch.stack([r.sum() for r in policy_ratios(row, reference)[1:]]).cpu()
            dist.all_reduce(kl)  # collective: all ranks
            kl = (kl / len(pairs)).clamp(min=0)

        # (e) update: one optimizer step; [D1] a mean over its pairs
        sums: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=env.device)
        )
        for row, reference in zip(rows, ref_logprobs, strict=True):
            logprobs, entropy = compute_logprobs(model, row)  # (T,) f32, 0 if not trained
            log_ratio = logprobs - reference  # (T,) f32
            chosen, rejected = log_ratios(row, log_ratio, means=args.means_over_tokens)
            loss = losses(chosen, rejected, kl.tolist()).sum() / len(pairs)
            likelihoods = row.sum_sequences(logprobs)  # (2 pairs,) f64: chosen, rejected, ...
            if args.sft_coef > 0:  # (RPO)
                nll = -likelihoods[0::2].sum() / int(num_tokens[0])
                loss = loss + args.sft_coef * nll
            loss.backward()  # FSDP sums gradients over ranks, so this is the global mean

            with torch.no_grad():
                wins, ties = wins_and_ties(chosen - rejected)
                # k3 (Schulman 2020) of KL(policy, reference), but on responses of neither
                drift = row.sum_sequences(torch.expm1(-log_ratio) + log_ratio)
                for name, value in {
                    "loss": loss,
                    "wins": wins,
                    "ties": ties,
                    "chosen_reward": args.beta * chosen.sum(),
                    "rejected_reward": args.beta * rejected.sum(),
                    "chosen_logprobs": likelihoods[0::2].sum(),
                    "rejected_logprobs": likelihoods[1::2].sum(),
                    "chosen_kl": drift[0::2].sum(),
                    "rejected_kl": drift[1::2].sum(),
                    "entropy": entropy.double().sum(),
                }.items():
                    sums[name] += value
        grad_norm = clip_grad_norm(model, args.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step}: gradient norm is {grad_norm}; no update was made")
        optimizer.step()
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()

        # (g) log: everything reduced over ranks once
        names = sorted(sums)
        totals = torch.stack([sums[name] for name in names]).cpu()
        dist.all_reduce(totals)  # collective: all ranks
        total = dict(zip(names, totals.tolist(), strict=True))
        row_tokens = int(tokens[pairs].sum())
        step_s = time.perf_counter() - step_start
        metrics = {
            "policy/loss": total["loss"],
            "policy/accuracy": total["wins"] / len(pairs),
            "policy/ties": total["ties"] / len(pairs),
            "policy/margin": (total["chosen_reward"] - total["rejected_reward"]) / len(pairs),
            "policy/chosen_reward": total["chosen_reward"] / len(pairs),
            "policy/rejected_reward": total["rejected_reward"] / len(pairs),
            "policy/chosen_logprobs": total["chosen_logprobs"] / len(pairs),
            "policy/rejected_logprobs": total["rejected_logprobs"] / len(pairs),
            "policy/entropy": total["entropy"] / int(num_tokens.sum()),
            "policy/loss_tokens": int(num_tokens.sum()),
            "policy/sft_loss": -total["chosen_logprobs"] / int(num_tokens[0]),
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": learning_rate,
            "data/epoch": step * args.pairs_per_step / len(dataset),
            "data/tokens": row_tokens,
            "data/shared_tokens": int(dataset.lengths[pairs].sum()) - row_tokens,
            "data/padding": 1 - row_tokens / token_slots(microbatches, tokens),
            "time/step_s": step_s,
            "time/pairs_per_s": len(pairs) / step_s,
            "time/tokens_per_s": row_tokens / step_s,
            "memory/peak_gb": peak_memory_gb(env.device),
        }
        if args.loss != "simpo":
            metrics["policy/chosen_kl"] = total["chosen_kl"] / int(num_tokens[0])
            metrics["policy/rejected_kl"] = total["rejected_kl"] / int(num_tokens[1])

        # (h) eval
        last = step == args.num_steps
        if eval_dataset is not None and (last or step % args.eval_every_steps == 0):
            metrics |= evaluate(eval_dataset)
        if online_rows and (last or step % args.online_every_steps == 0):
            metrics |= evaluate_online(step, baseline)[0]
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
    scorer.close()
    if engine is not None:
        engine.close()
    shutdown()


if __name__ == "__main__":
    main(parse_args(Args))
