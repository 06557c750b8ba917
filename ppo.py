"""PPO for language models: actor-critic RLHF with a learned reward (Ziegler et al. 2019,
arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155; clipped objective of arXiv:1707.06347).

Deviations from the papers:
[D1] loss tokens are averaged over the whole minibatch, not per response.
[D2] policy and critic are two networks with an optimizer each, so there is no value coefficient.
[D3] each token's policy loss (not its KL) is multiplied by min(pi_old / pi_engine, --tis_cap),
     without gradient: the engine that samples and the trainer round differently.
[D4] the split into minibatches is drawn once per step and kept over --update_epochs.
[D5] advantages are whitened over the response tokens of the whole step, on all ranks, with the
     population variance; TRL whitens per rank, and both TRL and verl use the sample variance.

Launch:
    python ppo.py --model runs/sft/final --dataset D.jsonl --rewards model:runs/rm/final \
        --output_dir runs/a --num_steps 100
    torchrun --standalone --nproc-per-node 8 ppo.py ...same flags...
Expected result: `bash scripts/pipeline.sh` (0.43M parameters, digit sorting, two CPU cores).

S sequences of a step, T packed tokens of a row, P prompts per step, G samples per prompt.
"""

import common  # noqa: F401  isort: skip  (first: sets the environment for torch and vLLM)

import copy
import json
import math
import os
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import PromptRow, load_prompts, stop_token_ids
from common.dist import all_gather_objects, parse_args, print0, setup, shutdown
from common.engine import Engine, build_engine
from common.logprobs import compute_logprobs, compute_values
from common.lora import LoraSettings, adapters_off
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
from common.rewards import (
    MODEL,
    RewardScorer,
    combine_rewards,
    reward_labels,
    reward_weights,
    validate_golds,
)
from common.rollouts import StoredRollouts, replay_order
from common.scoring import RewardModel
from common.tracking import Tracker, prepare_output_dir
from common.weight_sync import WeightSync, stream_full_tensors


@tyro.conf.configure(tyro.conf.FlagConversionOff)
@dataclass
class Args:
    """Improve a language model by PPO: reinforcement learning with a critic."""

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
    critic_model: str | None = None
    """folder or hub name that the critic starts from; None: the reward model if there is exactly
    one, without its score_bias (with --normalize_scores its head is set to zeros), else the policy
    with a head of zeros"""
    save_critic: bool = True
    """write the critic as well, in float32, to output_dir/critic"""
    ref_model: str | None = None
    """folder or hub name of the reference, whose KL --kl_coef weighs; None: the starting model"""

    # -- shared: dataset args --
    # data
    dataset: tuple[str, ...] = ()
    """files, folders or hub names (name:config:split), each with a slice or not: a.jsonl[:90%]"""
    rollouts_from: str | None = None
    """train on stored rollouts, with the scores that they have, and sample none: a run's folder, a
    folder of step_N.jsonl, or one file; replaces --dataset"""
    # -- end shared --
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
    # -- shared: length args --
    max_prompt_tokens: int = 512
    """longer prompts are dropped and counted"""
    max_response_tokens: int = 512
    """sampling stops here; such responses count as truncated"""
    # -- end shared --

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

    # optimization
    prompts_per_step: int = 256
    """P, global"""
    samples_per_prompt: int = 1
    """G; the critic is the baseline, so one will do"""
    num_minibatches: int = 4
    """optimizer steps per pass over the rollouts; must divide prompts_per_step"""
    update_epochs: int = 1
    """passes over the rollouts of a step"""
    critic_learning_rate: float = 1e-5
    """peak learning rate of the critic's AdamW, on the same schedule"""
    critic_warmup_steps: int = 0
    """first steps in which only the critic is trained"""
    # -- shared: batch args --
    max_tokens_per_microbatch: int = 16_384
    """packed tokens per forward (per rank); lower on OOM, results do not change"""
    packing: bool = True
    """False: one sequence per forward; slower, same results"""
    learning_rate: float = 1e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """after the warm-up; wsd: constant, then linear decay at the end"""
    warmup_ratio: float = 0.0
    """share of the run that is linear warm-up; --warmup_steps sets it in steps"""
    # -- end shared --
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
    temperature: float = 1.0
    """divides the logits for sampling and for all log-probs of the loss alike"""
    gamma: float = 1.0
    """discount per token"""
    gae_lambda: float = 0.95
    """trace decay of the policy's advantages"""
    critic_gae_lambda: float | None = None
    """trace decay of the critic's targets (VAPO: 1.0); None: gae_lambda"""
    whiten_advantages: bool = True
    """to mean 0 and variance 1 over all response tokens of the step [D5]"""
    clip_low: float = 0.2
    """ratios below 1 - clip_low get no gradient that lowers them further"""
    clip_high: float = 0.2
    """ratios above 1 + clip_high get no gradient that raises them further"""
    dual_clip: float | None = None
    """bound of the loss where the advantage is negative, in multiples of it (Ye et al. 2020: 3)"""
    value_clip: float | None = 0.2
    """no gradient for values that would move further from those at rollout time, in the units of
    the scores; None: no clip"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    tis_cap: float | None = 2.0
    """cap of the engine-trainer importance weight [D3]; None: no correction"""
    target_kl: float | None = None
    """once KL(old, new) exceeds this, in nats per token, the step makes no more policy updates"""
    truncated_responses: Literal["grade", "zero", "mask"] = "grade"
    """cut-off responses: graded as they are, scored 0, or graded but kept out of the loss"""

    # KL to the reference
    kl_coef: float = 0.05
    """weight of the KL to the reference, in units of the score per nat: a reward model whose scores
    spread by 10 needs 10 times as much as one whose scores spread by 1; 0: no reference is kept"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1: taken off the rewards, token by token, without gradient; k2, k3: in the loss, with it"""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: from --kl_coef on, it follows the measured KL (Ziegler et al. 2019, section 2.2)"""
    kl_controller_target: float = 6.0
    """nats per response that the adaptive controller aims at"""
    kl_controller_horizon: int = 10_000
    """responses; a step changes kl_coef by at most 20 % times its responses / this"""

    # what becomes of the scores
    missing_eos_penalty: float = 0.0
    """taken off the score of cut-off responses"""
    normalize_scores: bool = False
    """subtract the mean of all scores so far and divide by their std"""
    score_clip: float | None = None
    """scores, normalised or not, are cut to [-score_clip, score_clip]"""
    min_score: float | None = None
    """responses that score less, before all that, are kept out of both losses"""
    filtration: Literal["none", "best_k", "best_random", "best_worst"] = "none"
    """train on filtration_k of a prompt's responses only (PF-PPO): the best, the best one and
    random others, or half from either end"""
    filtration_k: int = 2
    """responses kept for each prompt"""

    # guard
    guard: Literal["off", "stop", "rollback"] = "off"
    """on a breach of a limit below, or a gradient that is not finite, return to the last good
    checkpoint; then write it and end the run with an error, or skip the data since then and go on.
    The last update is checked by one more rollout"""
    guard_kl: float = 1.0
    """limit of the KL to the reference, nats per token; not measured if --kl_coef is 0"""
    guard_reward_drop: float = 0.5
    """limit of a fall of the mean score below its running mean, as a share of the larger of that
    mean's size and the scores' std; at least 4 standard errors"""
    guard_entropy: float = 0.1
    """limit of a fall of the entropy, as a share of its running mean"""
    guard_grad_norm: float = 100.0
    """limit of the policy's gradient norm, as a multiple of its running mean"""
    guard_save_every_steps: int = 10
    """steps between checkpoints, of which the last one is kept until the run ends"""
    guard_max_rollbacks: int = 3
    """returns to the same checkpoint; one more breach ends the run"""

    # -- shared: eval args --
    # evaluation
    eval_dataset: tuple[str, ...] = ()
    """held-out rows, scored by the same rewards"""
    eval_split: str = "test"
    """like dataset_split"""
    eval_every_steps: int = 10
    """also before the first and after the last step"""
    eval_max_prompts: int | None = None
    """use only the first so many rows"""
    eval_samples_per_prompt: int = 1
    """n of the unbiased pass@k; k runs over the powers of two up to n"""
    eval_temperature: float = 0.0
    """0 is greedy"""
    eval_top_p: float = 1.0
    """nucleus sampling for evaluation only"""
    eval_success_score: float = 1.0
    """a response whose score reaches this counts as right"""
    # -- end shared --

    # -- shared: tracking args --
    wandb_project: str | None = None
    """log to this wandb project"""
    wandb_name: str | None = None
    """name of the wandb run"""
    # -- end shared --

    # -- shared: derived rollout args --
    @property
    def sequences_per_step(self) -> int:
        """S = P * G"""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_sequence_tokens(self) -> int:
        """longest prompt plus longest response"""
        return self.max_prompt_tokens + self.max_response_tokens

    # -- end shared --

    @property
    def optimizer_steps(self) -> int:
        """planned optimizer steps of the policy, the clock of its learning rate"""
        steps = self.num_steps - self.critic_warmup_steps
        return steps * self.num_minibatches * self.update_epochs

    @property
    def critic_optimizer_steps(self) -> int:
        """planned optimizer steps of the critic"""
        return self.num_steps * self.num_minibatches * self.update_epochs

    @property
    def critic_source(self) -> str:
        """what the critic starts from"""
        if self.critic_model is not None:
            return self.critic_model
        judges = [name.removeprefix(MODEL) for name in self.rewards if name.startswith(MODEL)]
        return judges[0] if len(judges) == 1 else self.model

    @property
    def inputs(self) -> tuple[str, ...]:
        """models and data that the run reads, and must not overwrite"""
        models, stored = [self.model, self.critic_source, self.ref_model or self.model], []
        if self.rollouts_from is not None:
            stored = [self.rollouts_from, f"{self.rollouts_from}/rollouts"]
        return (*models, *self.rewards, *self.dataset, *self.eval_dataset, *stored)

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
        # -- shared: rollout check --
        for name in (
            *("num_steps", "max_prompt_tokens", "max_response_tokens", "prompts_per_step"),
            *("num_minibatches", "update_epochs", "replicas", "timeout_s", "eval_every_steps"),
            *("eval_samples_per_prompt", "temperature", "max_grad_norm"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive and finite")
        for name in ("learning_rate", "weight_decay", "kl_coef", "seed", "eval_temperature"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
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
        # -- shared: eval check --
        if not 0 < self.eval_top_p <= 1:
            raise ValueError(f"--eval_top_p={self.eval_top_p} must be in (0, 1]")
        if self.eval_max_prompts is not None and self.eval_max_prompts < 1:
            raise ValueError(
                f"--eval_max_prompts={self.eval_max_prompts} must be positive, or None"
            )
        if self.eval_samples_per_prompt > 1 and self.eval_temperature == 0:
            raise ValueError(
                f"--eval_samples_per_prompt={self.eval_samples_per_prompt} greedy samples would be "
                "the same; set --eval_temperature"
            )
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
        # -- shared: update check --
        if self.rollouts_from is not None and self.dataset:
            raise ValueError(
                f"--rollouts_from={self.rollouts_from} replaces --dataset={' '.join(self.dataset)}"
            )
        if self.rollouts_from is None and not self.dataset:
            raise ValueError("--dataset is required, or --rollouts_from")
        if not self.rewards and (self.rollouts_from is None or self.eval_dataset):
            raise ValueError("--rewards is required")
        if self.rewards and self.rollouts_from is not None and not self.eval_dataset:
            raise ValueError(
                f"--rewards={' '.join(self.rewards)} has nothing to score: --rollouts_from brings "
                "scores along, and there is no --eval_dataset"
            )
        if self.prompts_per_step % self.num_minibatches:
            raise ValueError(
                f"--num_minibatches={self.num_minibatches} must divide "
                f"--prompts_per_step={self.prompts_per_step}"
            )
        if self.max_tokens_per_microbatch < self.max_sequence_tokens:
            raise ValueError(
                f"--max_tokens_per_microbatch={self.max_tokens_per_microbatch} must hold one whole "
                f"sequence: --max_prompt_tokens={self.max_prompt_tokens} plus "
                f"--max_response_tokens={self.max_response_tokens}"
            )
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0):
            raise ValueError(
                f"--clip_low={self.clip_low} --clip_high={self.clip_high}: no interval"
            )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"--dual_clip={self.dual_clip} must be above 1 and finite, or None")
        if self.tis_cap is not None and not self.tis_cap >= 1:
            raise ValueError(f"--tis_cap={self.tis_cap} must be at least 1, or None")
        # -- end shared --
        for name in (
            *("samples_per_prompt", "filtration_k"),
            *("guard_save_every_steps", "guard_max_rollbacks"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive")
        for name in ("gamma", "gae_lambda", "critic_gae_lambda", "guard_entropy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name}={value} must be in [0, 1]")
        for name in ("critic_learning_rate", "entropy_coef", "missing_eos_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
        for name in (
            *("value_clip", "target_kl", "score_clip", "kl_controller_target"),
            *("kl_controller_horizon", "guard_kl", "guard_reward_drop", "guard_grad_norm"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name}={value} must be positive and finite")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise ValueError(f"--min_score={self.min_score} must be finite, or None")
        if not 0 <= self.critic_warmup_steps < self.num_steps:
            raise ValueError(
                f"--critic_warmup_steps={self.critic_warmup_steps} must be below "
                f"--num_steps={self.num_steps}"
            )
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            raise ValueError("--kl_controller=adaptive needs a --kl_coef above 0 to start from")
        if self.kl_controller == "adaptive" and self.rollouts_from is not None:
            raise ValueError(
                f"--kl_controller=adaptive: --rollouts_from={self.rollouts_from} does not hold the "
                "policy's own samples, which would tell its KL"
            )
        if self.ref_model is not None and self.kl_coef == 0:
            raise ValueError(f"--ref_model={self.ref_model} is not used with --kl_coef=0")
        if (
            self.kl_controller == "adaptive"
            and self.sequences_per_step > self.kl_controller_horizon
        ):
            raise ValueError(
                f"--kl_controller_horizon={self.kl_controller_horizon} must not be below the "
                f"{self.sequences_per_step} responses of a step"
            )
        if self.filtration != "none" and self.samples_per_prompt <= self.filtration_k:
            raise ValueError(
                f"--filtration={self.filtration} keeps --filtration_k={self.filtration_k} of "
                f"--samples_per_prompt={self.samples_per_prompt} responses: nothing to leave out"
            )


# ---- algorithm: pure functions, tested against slow float64 loops ----


def last_actions(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T,) bool: the last True entry of the response_mask in each sequence.

    Args:
        response_mask: (T,) bool.
        cu_seqlens: (S+1,) i32 boundaries of the sequences.
    """
    counts = response_mask.long().cumsum(0)
    ends = counts[cu_seqlens[1:].long() - 1]  # (S,)
    per_token = ends.repeat_interleave(cu_seqlens.diff(), output_size=len(response_mask))
    return response_mask & (counts == per_token)


def token_rewards(
    scores: Tensor, kl: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, kl_coef: float
) -> Tensor:
    """Rewards of single tokens: -kl_coef * KL at each, plus the score at the last one.

    So the rewards of a sequence add up to its score - kl_coef * (sum of its KL).

    Args:
        scores: (T,) f32, the score of the sequence that the token belongs to.
        kl: (T,) f32 per-token KL estimates, without gradient.
        response_mask, cu_seqlens: (T,) bool and (S+1,) i32 of the packed row.

    Returns:
        (T,) f32, 0 where response_mask is False, whatever the other tensors hold there.
    """
    rewards = torch.where(response_mask, -kl_coef * kl, 0.0)
    return torch.where(last_actions(response_mask, cu_seqlens), rewards + scores, rewards)


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """GAE on packed rows (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t, where
    t counts the actions of one sequence: positions outside the response_mask (prompts, results of
    tools) are no steps. Nothing follows the last action, so V is 0 there, also after a response
    that was cut off. The sum is taken by doubling: log2(T) passes over the row, no loop over
    tokens; in f64.

    Args:
        rewards, values, response_mask: (T,) f32, f32, bool, aligned to actions; V at rollout time.
        cu_seqlens: (S+1,) i32 boundaries of the sequences; nothing crosses them.
        gamma, gae_lambda: discount and trace decay, both in [0, 1].

    Returns:
        advantages, returns: (T,) f32, 0 where response_mask is False; returns = advantages +
        values, the critic's targets.

    Raises:
        ValueError: the per-token tensors differ in length.
    """
    if not len(rewards) == len(values) == len(response_mask):
        raise ValueError(
            f"{len(rewards)} rewards, {len(values)} values, {len(response_mask)} mask entries"
        )
    numbers = torch.arange(len(cu_seqlens) - 1, device=rewards.device)
    sequence = numbers.repeat_interleave(cu_seqlens.diff(), output_size=len(rewards))
    sequence = sequence[response_mask]  # (A,), actions only
    r, v = rewards[response_mask].double(), values[response_mask].double()

    def later(x: Tensor, steps: int) -> Tensor:
        """x so many actions later, 0 beyond the end of the sequence."""
        same = sequence[steps:] == sequence[:-steps]
        return torch.cat([torch.where(same, x[steps:], 0.0), x.new_zeros(steps)])

    if len(r) == 0:  # a dummy row
        return torch.zeros_like(rewards), torch.zeros_like(rewards)
    sums = r + gamma * later(v, 1) - v  # after n passes, the first 2^n terms of the sum
    longest = int(torch.bincount(sequence).max())
    steps, decay = 1, gamma * gae_lambda
    while steps < longest:
        sums = sums + decay * later(sums, steps)
        steps, decay = 2 * steps, decay * decay
    advantages = torch.zeros_like(rewards).masked_scatter(response_mask, sums.to(rewards.dtype))
    returns = torch.zeros_like(rewards).masked_scatter(response_mask, (sums + v).to(rewards.dtype))
    return advantages, returns


def whiten(values: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Shift and scale to mean 0 and variance 1 over all ranks.  # collective: all ranks

    With the population variance. A std below 1e-6 of the root mean square is rounding noise: then
    all values become 0.

    Args:
        values, masks: this rank's microbatches, (T,) f32 and bool each; none at all is fine.

    Returns:
        (T,) f32 each, 0 outside the masks, which have no say in the statistics.
    """
    parts = [value[mask].double().cpu() for value, mask in zip(values, masks, strict=True)]
    local = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    total = torch.stack([torch.tensor(float(len(local)), dtype=torch.float64), local.sum()])
    dist.all_reduce(total)
    count = total[0].clamp(min=1)
    mean = total[1] / count
    squares = torch.stack([(local - mean).square().sum(), local.square().sum()])
    dist.all_reduce(squares)  # around the mean: the difference of two large sums would cancel
    variance, scale = squares[0] / count, squares[1] / count
    factor = (variance + 1e-8).rsqrt() if variance > 1e-12 * scale else torch.zeros(())
    return [
        torch.where(mask, (value.double() - mean.item()) * factor.item(), 0.0).float()
        for value, mask in zip(values, masks, strict=True)
    ]


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the critic, per token, and where the clip has cut its gradient.

    As in OpenAI's baselines: 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Args:
        new_values, values, returns: (T,) f32; gradients flow into `new_values` only.
        clip: c, in units of the score; None: no clip.

    Returns:
        (T,) f32 and (T,) bool; the caller masks and averages.
    """
    error = (new_values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    limited = values + (new_values - values).clamp(-clip, clip)
    limited_error = (limited - returns).square()
    # Where nothing is limited, the two errors may still differ by rounding.
    cut = (limited_error > error) & ((new_values - values).abs() > clip)
    return 0.5 * torch.max(error, limited_error), cut


def adapt_kl_coef(
    kl_coef: float, kl: float, *, target: float, horizon: float, num_responses: int
) -> float:
    """Next coefficient of the adaptive controller (Ziegler et al. 2019, section 2.2).

    Args:
        kl_coef: the present one.
        kl, target: measured and wanted, nats per response (sums over its tokens, not means).
        horizon, num_responses: responses; their ratio is K_beta of the paper, which has 0.1.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_responses / horizon)


def filter_by_rank(
    scores: Tensor, samples_per_prompt: int, *, keep: str, k: int, rng: np.random.Generator
) -> Tensor:
    """Which responses to train on, by the ranks of their scores among those to the same prompt.

    Reward models are most reliable at the ends of their range, so PF-PPO (Zhang et al. 2024,
    arXiv:2409.06957) gives the ranks between them less weight, here 0.

    Args:
        scores: (S,) one per response, groups contiguous; NaN is never kept.
        samples_per_prompt: G.
        keep: "best_k", the k best; "best_random", the best one and k - 1 random others;
            "best_worst", the better half of k from above (one more if k is odd), the rest from
            below. Ties go by the order of the samples.
        k: responses to keep per prompt; all, where no more have a score.
        rng: for "best_random".

    Returns:
        (S,) bool.
    """
    kept = torch.zeros(len(scores), dtype=torch.bool)
    for start in range(0, len(scores), samples_per_prompt):
        group = scores[start : start + samples_per_prompt].tolist()
        scored = [i for i, score in enumerate(group) if not math.isnan(score)]
        ranked = sorted(scored, key=lambda i: -group[i])
        if len(ranked) > k and keep == "best_random":
            ranked = [ranked[0], *rng.permutation(ranked[1:])[: k - 1].tolist()]
        elif len(ranked) > k and keep == "best_worst":
            ranked = ranked[: (k + 1) // 2] + ranked[len(ranked) - k // 2 :]
        kept[[start + i for i in ranked[:k]]] = True
    return kept


def add_to_moments(moments: list[float], values: Tensor) -> list[float]:
    """Count, mean and sum of squared deviations of all values so far (Chan et al. 1979).

    Args:
        moments: the three numbers before; [0, 0, 0] at first.
        values: (N,) finite, N may be 0.
    """
    count, mean, squares = moments
    n = len(values)
    if n == 0:
        return moments
    shift = values.double().mean().item() - mean
    squares += (values.double() - values.double().mean()).square().sum().item()
    squares += shift * shift * count * n / (count + n)
    return [count + n, mean + shift * n / (count + n), squares]


def guard_breach(
    measured: dict[str, float],
    usual: dict[str, float],
    *,
    num_responses: int,
    max_kl: float,
    reward_drop: float,
    entropy_share: float,
) -> str | None:
    """What shows that the last updates have damaged the policy, or None.

    Args:
        measured: `reward`, `reward_std`, `kl` (nats per token) and `entropy` of fresh samples.
        usual: running means of the same; empty before the first step.
        num_responses: behind `reward`, which has to fall by 4 standard errors at least.
        max_kl, reward_drop, entropy_share: see --guard_kl, --guard_reward_drop, --guard_entropy.
    """
    for name, value in measured.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    if measured["kl"] > max_kl:
        return f"KL {measured['kl']:.3g} nats per token > --guard_kl={max_kl}"
    if not usual:
        return None
    fall = usual["reward"] - measured["reward"]
    noise = 4 * usual["reward_std"] / math.sqrt(num_responses)
    if fall > max(noise, reward_drop * max(abs(usual["reward"]), usual["reward_std"])) > 0:
        return (
            f"reward {measured['reward']:.3g} fell from a running mean of {usual['reward']:.3g} "
            f"by more than --guard_reward_drop={reward_drop} allows"
        )
    if measured["entropy"] < entropy_share * usual["entropy"]:
        return (
            f"entropy {measured['entropy']:.3g} < --guard_entropy={entropy_share} times its "
            f"running mean, {usual['entropy']:.3g}"
        )
    return None


def add_to_usual(usual: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """Running means with a memory of about ten steps; the first values count as they are."""
    return usual | {k: 0.9 * usual.get(k, v) + 0.1 * v for k, v in measured.items()}


# -- shared: policy loss --
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per token (PPO, arXiv:1707.06347, eq. 7; asymmetric clip: DAPO eq. 8).

    Args:
        logprobs, old_logprobs, advantages: (T,) f32; gradients flow into `logprobs` only.
        clip_low, clip_high: the ratio may move inside [1 - clip_low, 1 + clip_high].
        dual_clip: where the advantage A is negative, the loss is at most dual_clip * |A|, however
            large the ratio (Ye et al. 2020, arXiv:1912.09729, eq. 5); beyond that no gradient.

    Returns:
        loss, ratio: (T,) f32 each; the caller masks and averages.
    """
    # e^80 is still finite in f32: what a clip removes has the gradient 0 then, and not 0 * inf.
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        bounded = torch.max(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return -surrogate, ratio


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimators of KL(pi || ref) on samples of pi (Schulman 2020, "Approximating KL").

    With r = log pi - log ref: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r, all (T,) f32. As a loss,
    on policy, k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi), and k1 has none in
    expectation, which is why k1 belongs in the score.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio


# -- end shared --


# -- shared: pass at k --
def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of k samples is right (Codex, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


# -- end shared --


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


# ---- data and rollouts: what forks change first ----

# -- shared: streams --
TRAIN_STREAM, EVAL_STREAM, TEST_STREAM, SPLIT_STREAM = range(4)
"""uses of randomness: training samples, evaluation, self-test, minibatches; each on its own"""
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


# -- shared: replay --
def replay(stored: StoredRollouts, groups: list[int], stop_ids: list[int]) -> Rollouts:
    """Stored samples, as `rollout` returned them when they were made.

    Where it is not said whether a response was cut off, it was if it ends with no stop token.
    """
    start = time.perf_counter()
    samples = stored.read(groups)
    names = {name: None for sample in samples for name in sample.components}  # in their order

    def component(name: str) -> Tensor:
        values = [sample.components.get(name, math.nan) for sample in samples]
        return torch.tensor(values, dtype=torch.float64)

    return Rollouts(
        rows=[PromptRow(s.prompt_ids, s.prompt, s.columns) for s in samples],
        response_ids=[s.response_ids for s in samples],
        rollout_logprobs=[s.rollout_logprobs for s in samples],
        truncated=torch.tensor(
            [
                s.response_ids[-1] not in stop_ids if s.truncated is None else s.truncated
                for s in samples
            ]
        ),
        scores=torch.tensor([s.score for s in samples], dtype=torch.float64),
        components={name: component(name) for name in names},
        responses=[s.response for s in samples],
        exceptions=0,
        timeouts=0,
        refused=0,
        rollout_s=time.perf_counter() - start,
        reward_s=0.0,
    )


# -- end shared --


@dataclass
class Microbatch:
    """One forward and backward; every tensor (T,), aligned to actions."""

    row: PackedRow
    rollout_logprobs: Tensor  # f32
    old_logprobs: Tensor = field(init=False)  # f32
    entropy: Tensor = field(init=False)  # f32, at rollout time
    ref_logprobs: Tensor = field(init=False)  # f32; old_logprobs without a reference
    values: Tensor = field(init=False)  # f32, at rollout time
    advantages: Tensor = field(init=False)  # f32
    returns: Tensor = field(init=False)  # f32


# -- shared: self-test limits --
MAX_GAP_FP32 = 1e-3
"""self-test, everything in float32: largest |log-prob difference|; a healthy run has 1e-5"""
MEAN_GAP_BF16 = 0.15
"""self-test, bfloat16 on either side: mean |log-prob difference|; a healthy run has 0.01 to 0.05"""
# -- end shared --


# -- shared: memory --
def peak_memory_gb(device: torch.device) -> float:
    """Peak of this rank in GiB: allocated GPU memory, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- end shared --


# -- shared: timed --
@contextmanager
def timed(times: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Add the seconds of the block to `times[name]`; waits for the GPU at its end."""
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times[name] += time.perf_counter() - start


# -- end shared --


def main(args: Args) -> None:
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
    # -- shared: prompts --
    def load(paths: tuple[str, ...], split: str, flag: str) -> list[PromptRow]:
        """Prompts that fit and whose answer the rewards can use; what was dropped is printed."""
        rows, report = load_prompts(
            list(paths),
            tokenizer,
            max_prompt_tokens=args.max_prompt_tokens,
            system_prompt=args.system_prompt,
            prompt_format=args.prompt_format,
            template_kwargs=args.template_args,
            split=split,
            flag=flag,
        )
        rows, unverifiable = validate_golds(args.rewards, rows)
        print0(report)
        if unverifiable:
            print0(f"  of these the rewards cannot use {unverifiable}; {len(rows)} remain")
        return rows

    rows: list[PromptRow] = []
    stored = None
    if args.rollouts_from is None:
        rows = load(args.dataset, args.dataset_split, "--dataset")
        print0(f"first prompt: {tokenizer.decode(rows[0].prompt_ids)!r}")
    else:
        stored = StoredRollouts(
            args.rollouts_from,
            samples_per_prompt=args.samples_per_prompt,
            max_prompt_tokens=args.max_prompt_tokens,
            max_response_tokens=args.max_response_tokens,
        )
        passes = args.num_steps * args.prompts_per_step / len(stored)
        print0(f"{stored}\n  {passes:.2f} passes in {args.num_steps} steps")
        if args.prompts_per_step > len(stored):
            raise ValueError(
                f"--rollouts_from={args.rollouts_from} has {len(stored)} prompts, fewer than "
                f"--prompts_per_step={args.prompts_per_step}"
            )
    eval_rows: list[PromptRow] = []
    if args.eval_dataset:
        eval_rows = load(args.eval_dataset, args.eval_split, "--eval_dataset")
        eval_rows = eval_rows[: args.eval_max_prompts]
    sizes = tuple(sum(row.source == i for row in rows) for i in range(len(args.dataset)))
    if args.dataset_weights is not None:
        print0(describe_mixture(args.dataset, sizes, args.dataset_weights, args.seed))
    scorer.wait_ready()  # a reward file that does not import ends the run here
    # -- end shared --

    # ---- [3] models and optimizer ----
    largest_id = max([*stop_ids, *(max(row.prompt_ids) for row in rows + eval_rows)])
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
    ref_source = args.ref_model or args.model
    for flag, name in (("--critic_model", args.critic_source), ("--ref_model", ref_source)):
        vocabulary = load_tokenizer(name, flag=flag).get_vocab()
        if not tokenizer.get_vocab().items() <= vocabulary.items():  # it may have tokens beyond
            raise ValueError(
                f"{flag}={name}: its tokenizer does not have the tokens of --model={args.model}, "
                "whose ids it has to read"
            )
    # A classifier needs a padding token, and the end of the run is late to say that there is none.
    pad_token = choose_pad_token(tokenizer, stop_ids) if args.save_critic else None
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
    # -- shared: stored ids --
    if stored is not None and stored.largest_id >= model.config.get_text_config().vocab_size:
        raise ValueError(
            f"--rollouts_from={args.rollouts_from} has token id {stored.largest_id}, which "
            f"--model={args.model} does not have"
        )

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
    # [D2] no value coefficient: the critic has an optimizer and a learning rate of its own
    print0(f"the critic starts from {args.critic_source}")
    critic = load_model(
        args.critic_source,
        env,
        dtype=dtype,
        head="score",
        new_head="zero",
        activation_checkpointing=args.activation_checkpointing,
        cpu_offload=args.cpu_offload,
        compile=args.compile,
        lora=args.lora,
        seed=args.seed,
        flag="--critic_model",
    )
    check_fits(
        critic,
        args.critic_source,
        max_tokens=args.max_sequence_tokens,
        largest_id=largest_id,
        flag="--critic_model",
    )
    if args.critic_model is None and args.normalize_scores:
        with torch.no_grad():  # the reward model's scores have another scale
            critic.get_submodule("score").get_parameter("weight").zero_()
    critic_optimizer, critic_scheduler = adamw(
        critic, args.critic_learning_rate, args.critic_optimizer_steps
    )
    ref_model = None
    kl_in_loss = args.kl_coef > 0 and args.kl_estimator != "k1"
    if args.kl_coef > 0 and (args.lora_rank is None or args.ref_model is not None):
        ref_model = load_model(
            ref_source,
            env,
            dtype=dtype,
            trainable=False,
            cpu_offload=args.cpu_offload or args.offload_frozen,
            flag="--ref_model" if args.ref_model else "--model",
        )
        max_tokens = args.max_sequence_tokens
        check_fits(
            ref_model, ref_source, max_tokens=max_tokens, largest_id=largest_id, flag="--ref_model"
        )
    if args.kl_controller == "adaptive":
        most = (1 + 0.2 * args.sequences_per_step / args.kl_controller_horizon) ** args.num_steps
        print0(f"kl_coef can grow to {most:.3g} times --kl_coef={args.kl_coef} in this run")
    # What the run knows beside its networks; saved and restored with them.
    state: dict[str, Any] = {"kl_coef": args.kl_coef, "moments": [0.0, 0.0, 0.0], "usual": {}}
    checkpoint: Path | None = None
    networks = {"policy": (model, optimizer), "critic": (critic, critic_optimizer)}

    # ---- [4] inference engine ----
    # -- shared: engine --
    engine_dtype = "bfloat16" if dtype == torch.bfloat16 else "float32"
    if args.engine_dtype != "auto":
        engine_dtype = args.engine_dtype
    engine = weight_sync = None
    if stored is None or eval_rows:
        engine = build_engine(
            args.model,
            backend=args.engine,
            dtype=engine_dtype,
            max_model_len=args.max_sequence_tokens,
            max_num_seqs=args.engine_max_sequences,
            tensor_parallel=args.engine_tensor_parallel,
            seed=args.seed,
            kv_cache_bytes=int(args.engine_kv_cache_gb * 2**30),
            gpu_memory_utilization=args.engine_gpu_memory,
            device=env.device,
        )
        weight_sync = WeightSync(model, engine, bucket_bytes=args.sync_bucket_mb * 2**20)

    @torch.no_grad()
    def token_logprobs(
        policy: PreTrainedModel, microbatches: list[Microbatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """(T,) log-probs and entropy of each packed row, by the same code as in the update."""
        return [compute_logprobs(policy, m.row, temperature=args.temperature) for m in microbatches]

    def pack_microbatches(samples: Rollouts, sequence_ids: list[int]) -> list[Microbatch]:
        """This rank's share of the given sequences, packed; the same count on every rank."""
        ids = [samples.rows[s].prompt_ids + samples.response_ids[s] for s in sequence_ids]
        masks = [
            [False] * len(samples.rows[s].prompt_ids) + [True] * len(samples.response_ids[s])
            for s in sequence_ids
        ]
        plan = plan_microbatches(
            [len(sequence) for sequence in ids],
            world_size=env.world_size,
            max_tokens=args.max_tokens_per_microbatch,
            packing=args.packing,
        )
        microbatches = []
        for members in plan[env.rank]:
            row = pack(
                [sequence_ids[m] for m in members],
                [ids[m] for m in members],
                [masks[m] for m in members],
            )
            rollout_logprobs = row.lay_out([samples.rollout_logprobs[s] for s in row.sequence_ids])
            microbatches.append(Microbatch(row.to(env.device), rollout_logprobs.to(env.device)))
        return microbatches

    def sample(
        prompt_rows: list[PromptRow], stream: tuple[int, ...], what: str, **how: Any
    ) -> Rollouts:
        """`rollout` with this run's settings."""
        assert engine is not None
        return rollout(
            prompt_rows,
            engine,
            scorer,
            reward_models,
            tokenizer,
            stream=(args.seed, *stream),
            tensor_parallel=args.engine_tensor_parallel,
            max_tokens=args.max_response_tokens,
            stop_ids=stop_ids,
            weights=reward_weights(args.rewards, args.reward_weights),
            max_failures=args.max_reward_failures,
            on_progress=lambda done, total: tracker.phase(what, done, total),
            **how,
        )

    def sync_engine() -> None:
        """Trainer's weights -> engine; order matters where the engine sleeps (GPU)."""
        assert engine is not None and weight_sync is not None
        engine.wake_weights()
        weight_sync.sync()
        engine.wake_kv_cache()

    def evaluate(step: int) -> dict[str, float]:
        """Score samples of the held-out prompts; the same random streams every time."""
        start = time.perf_counter()
        n = args.eval_samples_per_prompt
        samples = sample(
            eval_rows,
            (EVAL_STREAM,),
            "eval",
            samples_per_prompt=n,
            temperature=args.eval_temperature,
            top_p=args.eval_top_p,
        )
        tracker.dump_samples(f"eval_{step}", samples.dump())
        right = (samples.scores >= args.eval_success_score).view(-1, n)  # (P, n); NaN is not right
        metrics = {
            "eval/reward": samples.scores.nanmean().item(),
            "eval/accuracy": right.double().mean().item(),
            "eval/response_tokens": samples.response_lengths.double().mean().item(),
            "eval/truncated": samples.truncated.double().mean().item(),
            "eval/unscored": samples.scores.isnan().double().mean().item(),
            "time/eval_s": time.perf_counter() - start,
        }
        for k in [2**i for i in range(1, n.bit_length()) if 2**i <= n]:
            chances = [pass_at_k(n, int(count), k) for count in right.sum(1)]
            metrics[f"eval/pass_at_{k}"] = sum(chances) / len(chances)
        for name, values in samples.components.items():
            metrics[f"eval/reward/{name}"] = values.nanmean().item()
        return metrics

    # -- end shared --

    def reduce(sums: dict[str, Tensor]) -> dict[str, float]:
        """The same sums over all ranks; 0 for those that no row has added to."""
        names = sorted(sums)
        start = torch.zeros(1, dtype=torch.float64, device=env.device)  # there may be no sums
        totals = torch.cat([start, *(sums[name][None] for name in names)])[
            1:
        ].cpu()  # one host sync
        dist.all_reduce(totals)  # collective: all ranks
        return defaultdict(float, zip(names, totals.tolist(), strict=True))

    def restore(breach: str) -> None:
        """Back to the last good checkpoint, but for the clocks of the learning rates."""
        if checkpoint is None:
            raise ValueError(f"guard: {breach}, with the starting model")
        state.update(load_checkpoint(checkpoint, networks))
        print0(
            f"guard: {breach}. Policy, critic and optimizers are those of {checkpoint.name} again; "
            "the data since then is skipped"
        )

    tracker = Tracker(
        output_dir,
        asdict(args) | {"world_size": env.world_size, "resolved_dtype": str(dtype)},
        enabled=env.rank == 0,
        total_steps=args.num_steps,
        columns={
            "reward": "rollout/reward",
            "eval": "eval/reward",
            "tokens": "rollout/response_tokens",
            "entropy": "policy/entropy",
            "kl": "policy/kl_response",
            "explained": "value/explained_variance",
            "gap": "rollout/logprob_gap_max",
            "cut": "rollout/truncated",
            "grad": "optim/grad_norm",
            "s": "time/step_s",
            "tok/s": "time/tokens_per_s",
        },
        wandb_project=args.wandb_project,
        wandb_name=args.wandb_name,
        source=__file__,
    )

    # -- shared: self-test --
    # Self-test: the engine's log-probs of its own samples and the trainer's must agree, or weights
    # did not arrive, temperature is on one side only, or packed rows leak into each other.
    if engine is not None:
        tracker.phase("self-test")
        sync_engine()
        num_tests = max(8, env.world_size)
        test_rows = rows or eval_rows
        samples = sample(
            [test_rows[i % len(test_rows)] for i in range(num_tests)],
            (TEST_STREAM,),
            "self-test",
            samples_per_prompt=1,
            temperature=args.temperature,
            top_p=1.0,
        )
        microbatches = pack_microbatches(samples, list(range(num_tests)))
        gaps = torch.cat(
            [
                (logprobs - m.rollout_logprobs)[m.row.response_mask].abs()
                for m, (logprobs, _) in zip(
                    microbatches, token_logprobs(model, microbatches), strict=True
                )
            ]
        )
        gaps = torch.cat([torch.from_numpy(g) for g in all_gather_objects(gaps.cpu().numpy())])
        exact = dtype == torch.float32 and engine.dtype == torch.float32
        gap, limit = (gaps.max(), MAX_GAP_FP32) if exact else (gaps.mean(), MEAN_GAP_BF16)
        print0(
            f"self-test: engine and trainer log-probs of {len(gaps)} sampled tokens differ by "
            f"{gaps.mean():.1e} on average, {gaps.max():.1e} at most"
        )
        if not gap <= limit:
            raise RuntimeError(
                f"self-test failed: {'largest' if exact else 'mean'} log-prob gap {gap:.3g} > "
                f"{limit}. Check that the engine serves the same architecture (rope scaling, "
                f"sliding window, soft-capping), that --temperature={args.temperature} reaches "
                "both sides, and try --dtype float32, --engine transformers and --packing False to "
                "find the side at fault; if float32 agrees, it is the rounding of bfloat16."
            )
    if eval_rows:
        tracker.log(0, evaluate(0))
    # -- end shared --

    # ---- [5] train loop ----
    num_rollbacks = num_returns = 0  # in all, and to the present checkpoint
    failure = None  # what ends the run before its last step
    # With a guard there is one more rollout: it has the say whether the last update was good.
    for step in range(1, args.num_steps + 1 + (args.guard != "off")):
        times: dict[str, float] = defaultdict(float)
        step_start = time.perf_counter()

        # (a) rollout: token ids in; token ids and the log-probs they were sampled with out
        # -- shared: next rollouts --
        if stored is None:
            indices = batch_indices(
                step,
                sizes=sizes,
                weights=args.dataset_weights,
                rows_per_step=args.prompts_per_step,
                seed=args.seed,
            )
            samples = sample(
                [rows[i] for i in indices],
                (TRAIN_STREAM, step),
                "rollout",
                samples_per_prompt=args.samples_per_prompt,
                temperature=args.temperature,
                top_p=1.0,  # anything else would sample from another policy than the loss assumes
            )
        else:
            groups = replay_order(
                step,
                num_groups=len(stored),
                groups_per_step=args.prompts_per_step,
                seed=args.seed,
            )
            samples = replay(stored, groups, stop_ids)
        if engine is not None:
            engine.sleep()
        # -- end shared --

        # (b) rewards: `rollout` has scored the responses; this is what the run makes of the scores
        if not samples.scores.isfinite().any() and args.guard == "off":
            raise ValueError(f"none of the {args.sequences_per_step} samples has a score")
        # -- shared: scores --
        scores = samples.scores.clone()  # (S,) f64
        in_loss = scores.isfinite()  # (S,) bool: unscored responses have no advantage
        if args.truncated_responses == "zero":
            scores[samples.truncated & in_loss] = 0.0
        elif args.truncated_responses == "mask":
            in_loss &= ~samples.truncated
        # -- end shared --
        # Which responses are trained on, and what becomes of the scores
        split = np.random.default_rng((args.seed, SPLIT_STREAM, step))
        kept = in_loss.clone()  # (S,) bool: responses to train on
        if args.filtration != "none":
            kept = filter_by_rank(
                torch.where(in_loss, scores, math.nan),
                args.samples_per_prompt,
                keep=args.filtration,
                k=args.filtration_k,
                rng=split,
            )
        if args.min_score is not None:
            kept &= scores >= args.min_score
        if args.normalize_scores:
            moments = add_to_moments(state["moments"], scores[scores.isfinite()])
            count, mean, squares = moments
            std = math.sqrt(squares / max(1.0, count))
            scores = (scores - mean) / (std if std > 1e-6 * abs(mean) else 1.0)
        else:
            moments = state["moments"]
        if args.score_clip is not None:
            scores = scores.clamp(-args.score_clip, args.score_clip)
        scores = scores - args.missing_eos_penalty * samples.truncated

        # (c) log-probs of the old policy and the reference, values of the critic, by the code path
        # of the update
        order = split.permutation(args.prompts_per_step)  # [D4]
        minibatches: list[tuple[list[Microbatch], int]] = []
        for prompts in np.split(order, args.num_minibatches):
            sequence_ids = [
                int(p) * args.samples_per_prompt + g
                for p in prompts
                for g in range(args.samples_per_prompt)
                if kept[int(p) * args.samples_per_prompt + g]
            ]
            # Counted once, before the first backward, over all ranks and microbatches.
            num_loss_tokens = sum(len(samples.response_ids[s]) for s in sequence_ids)
            minibatches.append((pack_microbatches(samples, sequence_ids), num_loss_tokens))
        trained_rows = [m for microbatches, _ in minibatches for m in microbatches]
        left_out = [s for s in range(args.sequences_per_step) if not kept[s]]
        all_rows = trained_rows + pack_microbatches(samples, left_out)
        num_tokens = int(samples.response_lengths.sum())
        sums: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=env.device)
        )
        gap_max = torch.zeros((), device=env.device)
        with timed(times, "time/logprobs_s", env.device):
            for m, (old_logprobs, entropy) in zip(
                all_rows, token_logprobs(model, all_rows), strict=True
            ):
                m.old_logprobs = m.ref_logprobs = old_logprobs
                m.entropy = entropy
            if args.kl_coef > 0:
                if ref_model is None:  # LoRA: the reference is the model without its adapters
                    with adapters_off(model):
                        ref_logprobs = token_logprobs(model, all_rows)
                else:
                    ref_logprobs = token_logprobs(ref_model, all_rows)
                for m, (value, _) in zip(all_rows, ref_logprobs, strict=True):
                    m.ref_logprobs = value
            with torch.no_grad():
                for m in trained_rows:
                    m.values = compute_values(critic, m.row)
            for m in all_rows:
                gap = m.old_logprobs - m.rollout_logprobs
                for name, value in {
                    "entropy": m.entropy,
                    "kl_k1": kl_estimate(m.old_logprobs, m.ref_logprobs, "k1"),
                    "kl_ref": kl_estimate(m.old_logprobs, m.ref_logprobs, "k3"),
                    "gap": gap.abs(),
                    "gap_k3": kl_estimate(m.rollout_logprobs, m.old_logprobs, "k3"),
                    "tis_capped": gap.exp() > (args.tis_cap or math.inf),
                }.items():
                    sums[name] += torch.where(m.row.response_mask, value.double(), 0.0).sum()
                gap_max = torch.maximum(
                    gap_max, torch.where(m.row.response_mask, gap.abs(), 0.0).max()
                )
            per_token = {name: value / num_tokens for name, value in reduce(sums).items()}
            kl_response = per_token["kl_k1"] * num_tokens / args.sequences_per_step

        # Guard: fresh samples show whether the policy is still sound. If so, this is the moment to
        # save it; if not, nothing is trained in this step. Stored samples are not its own: their
        # scores say nothing of it, and k1 on them may be negative however far it is away.
        scored = samples.scores[samples.scores.isfinite()]
        measured = {
            "reward": scored.mean().item(),
            "reward_std": scored.std(correction=0).item(),
            "kl": per_token["kl_k1" if stored is None else "kl_ref"],
            "entropy": per_token["entropy"],
        }
        breach = None
        if args.guard != "off":
            breach = guard_breach(
                measured,
                state["usual"],
                num_responses=len(scored),
                max_kl=args.guard_kl,
                reward_drop=args.guard_reward_drop if stored is None else math.inf,
                entropy_share=args.guard_entropy,
            )
        if breach is not None:
            breach = f"step {step}: {breach}"
        if breach is None and step <= args.num_steps:
            if args.guard != "off" and (
                checkpoint is None or (step - 1) % args.guard_save_every_steps == 0
            ):
                tracker.phase("saving a checkpoint")
                previous = checkpoint
                checkpoint, num_returns = output_dir / "checkpoints" / f"step_{step - 1}", 0
                save_checkpoint(checkpoint, networks, state)  # without this step's data
                if previous is not None and env.rank == 0:
                    shutil.rmtree(previous, ignore_errors=True)
            state |= {"moments": moments, "usual": add_to_usual(state["usual"], measured)}
        if step > args.num_steps:
            if breach is not None:
                restore(breach)
                metrics = {
                    "rollout/reward": measured["reward"],
                    "optim/rollbacks": num_rollbacks + 1,
                }
                if eval_rows:  # of what goes into `final`
                    sync_engine()
                    metrics |= evaluate(step)
                tracker.log(step, metrics)
                if args.guard == "stop":
                    failure = breach
            break

        # (d) advantages: rewards per token, GAE, whitening
        sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=env.device))
        kl_coef = state["kl_coef"]
        for m in trained_rows:
            rewards = token_rewards(
                m.row.expand(scores),
                kl_estimate(m.old_logprobs, m.ref_logprobs, "k1"),
                m.row.response_mask,
                m.row.cu_seqlens,
                kl_coef=0.0 if kl_in_loss else kl_coef,
            )
            of_row = (rewards, m.values, m.row.response_mask, m.row.cu_seqlens)
            m.advantages, m.returns = gae(
                *of_row, gamma=args.gamma, gae_lambda=args.gae_lambda
            )  # (T,) f32 each
            if args.critic_gae_lambda is not None:
                _, m.returns = gae(*of_row, gamma=args.gamma, gae_lambda=args.critic_gae_lambda)
            for name, value in {
                "values": m.values,
                "returns": m.returns,
                "returns_squared": m.returns.double().square(),
                "errors": m.returns - m.values,
                "errors_squared": (m.returns - m.values).double().square(),
            }.items():
                sums[name] += torch.where(m.row.response_mask, value.double(), 0.0).sum()
        if args.whiten_advantages:  # [D5]
            whitened = whiten(
                [m.advantages for m in trained_rows], [m.row.response_mask for m in trained_rows]
            )
            for m, value in zip(trained_rows, whitened, strict=True):
                m.advantages = value
        advantages = torch.zeros(args.sequences_per_step, dtype=torch.float64)  # (S,) means
        for m in trained_rows:
            sums_of_rows = m.row.sum_sequences(m.advantages).cpu()
            for s, value in zip(m.row.sequence_ids, sums_of_rows.tolist(), strict=True):
                advantages[s] = value / len(samples.response_ids[s])
        dist.all_reduce(advantages)  # collective: all ranks; each holds its own sequences
        advantages[~kept] = math.nan

        # (e) update: one optimizer step of policy and critic per minibatch
        first_ratio_error = torch.zeros((), device=env.device)
        grad_norms: list[float] = []
        critic_grad_norms: list[float] = []
        policy_tokens = critic_tokens = policy_minibatches = 0
        stopped = False  # by --target_kl
        updates = args.num_minibatches * args.update_epochs
        number = 0
        with timed(times, "time/update_s", env.device):
            for microbatches, num_loss_tokens in minibatches * args.update_epochs:
                if breach is not None:
                    break
                number += 1
                trains_policy = not stopped and step > args.critic_warmup_steps
                moved = torch.zeros((), dtype=torch.float64, device=env.device)
                for m in microbatches:
                    loss_mask = m.row.response_mask
                    if trains_policy:
                        logprobs, entropy = compute_logprobs(
                            model, m.row, temperature=args.temperature
                        )
                        token_loss, ratio = policy_loss(
                            logprobs,
                            m.old_logprobs,
                            m.advantages,
                            clip_low=args.clip_low,
                            clip_high=args.clip_high,
                            dual_clip=args.dual_clip,
                        )  # (T,) f32
                        if args.tis_cap is not None:  # [D3]
                            gap = m.old_logprobs - m.rollout_logprobs
                            token_loss = token_loss * gap.exp().clamp(max=args.tis_cap)
                        if kl_in_loss:
                            token_loss = token_loss + kl_coef * kl_estimate(
                                logprobs, m.ref_logprobs, args.kl_estimator
                            )
                        if args.entropy_coef > 0:
                            token_loss = token_loss - args.entropy_coef * entropy
                        # [D1] FSDP sums gradients over ranks, so this is the global mean.
                        loss = torch.where(loss_mask, token_loss, 0.0).sum() / max(
                            1, num_loss_tokens
                        )
                        loss.backward()

                        kl_old = kl_estimate(m.old_logprobs, logprobs.detach(), "k3").double()
                        moved += torch.where(loss_mask, kl_old, 0.0).sum()
                        sums["loss"] += loss.detach()
                        for name, value in {
                            "clip_low": (ratio < 1 - args.clip_low) & (m.advantages < 0),
                            "clip_high": (ratio > 1 + args.clip_high) & (m.advantages > 0),
                        }.items():
                            sums[name] += torch.where(loss_mask, value.double(), 0.0).sum()
                        if number == 1:
                            error = torch.where(loss_mask, (ratio.detach() - 1).abs(), 0.0).max()
                            first_ratio_error = torch.maximum(first_ratio_error, error)
                    token_loss, value_clipped = value_loss(
                        compute_values(critic, m.row), m.values, m.returns, clip=args.value_clip
                    )
                    loss = torch.where(loss_mask, token_loss, 0.0).sum() / max(1, num_loss_tokens)
                    loss.backward()
                    sums["value_loss"] += loss.detach()
                    sums["value_clipped"] += (value_clipped & loss_mask).sum()
                critic_tokens += num_loss_tokens
                if trains_policy:
                    sums["kl_old"] += moved
                    policy_tokens += num_loss_tokens
                    policy_minibatches += num_loss_tokens > 0
                if trains_policy and args.target_kl is not None:
                    dist.all_reduce(total_moved := moved.cpu())  # collective: all ranks
                    stopped = total_moved.item() > args.target_kl * num_loss_tokens
                    if stopped:
                        trains_policy = False
                        optimizer.zero_grad()
                if num_loss_tokens > 0:  # else there is nothing to follow but momentum
                    if trains_policy:
                        grad_norms.append(clip_grad_norm(model, args.max_grad_norm))
                        limit = args.guard_grad_norm * state["usual"].get("grad_norm", math.inf)
                        if not math.isfinite(grad_norms[-1]):
                            breach = f"step {step}: the policy's gradient norm is {grad_norms[-1]}"
                        elif args.guard != "off" and grad_norms[-1] > limit:
                            breach = (
                                f"step {step}: the policy's gradient norm {grad_norms[-1]:.3g} > "
                                f"--guard_grad_norm={args.guard_grad_norm} times its running mean"
                            )
                    critic_grad_norms.append(clip_grad_norm(critic, args.max_grad_norm))
                    if not math.isfinite(critic_grad_norms[-1]):
                        breach = (
                            f"step {step}: the critic's gradient norm is {critic_grad_norms[-1]}"
                        )
                    if breach is not None and args.guard == "off":
                        raise RuntimeError(f"{breach}; this update was not made")
                    if breach is None:
                        if trains_policy:
                            optimizer.step()
                        critic_optimizer.step()
                learning_rate = scheduler.get_last_lr()[0]
                critic_learning_rate = critic_scheduler.get_last_lr()[0]
                if step > args.critic_warmup_steps:
                    scheduler.step()
                critic_scheduler.step()
                optimizer.zero_grad()
                critic_optimizer.zero_grad()
        if breach is not None:
            restore(breach)
            num_rollbacks, num_returns = num_rollbacks + 1, num_returns + 1
            if args.guard == "stop" or num_returns > args.guard_max_rollbacks:
                failure = breach
            for _ in range(updates - number):  # what is left of the step's updates
                if step > args.critic_warmup_steps:
                    scheduler.step()
                critic_scheduler.step()
        else:
            norm = sum(grad_norms) / max(1, len(grad_norms))
            if norm > 0:  # else there was nothing to learn from, and any gradient would be a breach
                state["usual"] = add_to_usual(state["usual"], {"grad_norm": norm})
            if args.kl_controller == "adaptive" and step > args.critic_warmup_steps:
                state["kl_coef"] = adapt_kl_coef(
                    kl_coef,
                    kl_response,
                    target=args.kl_controller_target,
                    horizon=args.kl_controller_horizon,
                    num_responses=args.sequences_per_step,
                )
            if not kept.any():
                print0(f"step {step}: no sample is left after the filters, so nothing was trained")

        # (f) weight sync: FSDP2 shards -> engine, proven complete
        last = step == args.num_steps
        evaluates = bool(eval_rows) and (step % args.eval_every_steps == 0 or last)
        with timed(times, "time/sync_s", env.device):
            if stored is None or evaluates:
                sync_engine()
        step_s = time.perf_counter() - step_start

        # (g) log: everything reduced over ranks once
        total = reduce(sums)
        worst = torch.stack([gap_max, first_ratio_error]).cpu()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # collective: all ranks
        loss_tokens = sum(n for _, n in minibatches)
        n, visits = max(1, loss_tokens), max(1, policy_tokens)
        mean_return, mean_error = total["returns"] / n, total["errors"] / n
        variance = total["returns_squared"] / n - mean_return**2
        error_variance = total["errors_squared"] / n - mean_error**2
        planned = updates if step > args.critic_warmup_steps else 0
        lengths = samples.response_lengths
        metrics = {
            "rollout/reward": measured["reward"],
            "rollout/reward_std": scored.std(correction=min(1, len(scored) - 1)).item(),
            "rollout/unscored": samples.scores.isnan().double().mean().item(),
            "rollout/reward_exceptions": samples.exceptions,
            "rollout/reward_timeouts": samples.timeouts,
            "rollout/reward_refused": samples.refused,
            "rollout/shaped_reward": scores.nanmean().item(),
            "rollout/filtered": (samples.scores.isfinite() & ~kept).double().mean().item(),
            "rollout/response_tokens": lengths.double().mean().item(),
            "rollout/response_tokens_max": lengths.max().item(),
            "rollout/truncated": samples.truncated.double().mean().item(),
            "rollout/logprob_gap_mean": per_token["gap"],
            "rollout/logprob_gap_max": worst[0].item(),
            "rollout/logprob_gap_kl": per_token["gap_k3"],
            "policy/loss": total["loss"] / max(1, policy_minibatches),
            "policy/loss_tokens": loss_tokens / args.num_minibatches,
            "policy/entropy": per_token["entropy"],
            "policy/clip_fraction": (total["clip_low"] + total["clip_high"]) / visits,
            "policy/clip_fraction_low": total["clip_low"] / visits,
            "policy/clip_fraction_high": total["clip_high"] / visits,
            "policy/kl_old": total["kl_old"] / visits,
            "policy/tis_capped": per_token["tis_capped"],
            "policy/first_ratio_error": worst[1].item(),
            "policy/skipped_updates": 1 - len(grad_norms) / planned if planned else 0.0,
            "value/loss": total["value_loss"] / max(1, len(critic_grad_norms)),
            "value/clip_fraction": total["value_clipped"] / max(1, critic_tokens),
            "value/mean": total["values"] / n,
            "value/return": mean_return,
            "value/explained_variance": 1 - error_variance / variance if variance > 0 else 0.0,
            "optim/grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
            "optim/critic_grad_norm": sum(critic_grad_norms) / max(1, len(critic_grad_norms)),
            "optim/learning_rate": learning_rate,
            "optim/critic_learning_rate": critic_learning_rate,
            "time/rollout_s": samples.rollout_s,
            "time/rewards_s": samples.reward_s,
            "time/step_s": step_s,
            "time/tokens_per_s": num_tokens / step_s,
            "memory/peak_gb": peak_memory_gb(env.device),
            **times,
        }
        if args.kl_coef > 0:
            metrics["policy/kl_ref"] = per_token["kl_ref"]
            metrics["policy/kl_response"] = kl_response
            metrics["policy/kl_coef"] = kl_coef
        if args.guard != "off":
            metrics["optim/rollbacks"] = num_rollbacks
        for name, values in samples.components.items():
            metrics[f"rollout/reward/{name}"] = values.nanmean().item()
        tracker.dump_samples(f"step_{step}", samples.dump(advantages))

        # -- shared: stored gap --
        gap = metrics["rollout/logprob_gap_mean"]
        if stored is not None and step == 1 and not gap <= MEAN_GAP_BF16:
            print0(
                f"log-probs of --rollouts_from={args.rollouts_from} differ by {gap:.2g} on average "
                f"from those of --model={args.model} at --temperature={args.temperature}: were the "
                "samples made by another model, or at another temperature?"
            )
        # -- end shared --

        # (h) eval
        if evaluates:
            metrics |= evaluate(step)
        tracker.log(step, metrics)
        if failure is not None:
            break

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
    if args.save_critic:
        critic_tokenizer = copy.deepcopy(tokenizer)
        critic_tokenizer.pad_token = pad_token
        export_hf(
            critic,
            critic_tokenizer,
            stream_full_tensors(critic, dtype=torch.float32),
            path=output_dir / "critic",
            source=args.critic_source,
            stop_token_ids=stop_ids,
        )
    if env.rank == 0:
        shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
    scorer.close()
    if engine is not None:
        engine.close()
    if failure is not None:
        raise ValueError(f"guard: {failure}. `final` is the policy of the last good checkpoint")
    shutdown()


if __name__ == "__main__":
    main(parse_args(Args))
