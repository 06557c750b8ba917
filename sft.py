"""SFT: supervised fine-tuning by maximum likelihood of the response tokens.

loss = - sum over trained tokens of log pi(token | what precedes it in its own sequence), divided by
the number of trained tokens of the optimizer step, counted over all ranks and microbatches.

Deviations from common practice:
[D1] one mean over all trained tokens of a step, not a mean of per-sequence or per-rank means.

Launch:
    python sft.py --model M --dataset D.jsonl --output_dir runs/a --num_steps 100
    torchrun --standalone --nproc-per-node 8 sft.py ...same flags...
Expected result: `bash scripts/demo.sh` warm-starts its toy model with it (two CPU cores).

S sequences of a step, T packed tokens of a row.
"""

import common  # noqa: F401  isort: skip  (first: sets the environment for torch and vLLM)

import math
import resource
import time
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro

from common.data import TokenRow, load_sft_rows, render_example, stop_token_ids
from common.dist import parse_args, print0, setup, shutdown
from common.logprobs import compute_logprobs
from common.model import (
    clip_grad_norm,
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
    activation_checkpointing: bool = False
    """recompute layers in the backward pass: less memory, same results, about a third slower"""
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the final checkpoint"""
    replicas: int = 1
    """HSDP: full copies of the sharded model (1: shard over all ranks); must divide the ranks"""
    timeout_s: float = 1800.0
    """seconds until a collective that some rank never reaches fails; longer than a slow rollout"""
    # -- end shared --

    # data
    dataset: tuple[str, ...] = ()
    """files, folders or hub names: messages, prompt+completion, text or instruction+output rows"""
    dataset_split: str = "train"
    """split of a hub dataset or of a folder whose files are named by split"""
    system_prompt: str | None = None
    """put before every conversation that brings no system message of its own"""
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """chat: through the chat template; text: as it is; auto: chat where there is a template"""
    max_sequence_tokens: int = 2048
    """longer sequences are dropped and counted"""

    # optimization
    sequences_per_step: int = 64
    """S, global"""
    max_tokens_per_microbatch: int = 16_384
    """packed tokens per forward (per rank); lower on OOM, results do not change"""
    packing: bool = True
    """False: one sequence per forward; slower, same results"""
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """linear and cosine end at 0"""
    warmup_steps: int | None = None
    """optimizer steps of linear warm-up; None: 3 % of the run"""
    # -- shared: optimizer args --
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay"""
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
    def num_warmup_steps(self) -> int:
        """optimizer steps of linear warm-up"""
        if self.warmup_steps is None:
            return math.ceil(0.03 * self.num_steps)
        return self.warmup_steps

    def __post_init__(self) -> None:
        """Refuse what cannot work before anything expensive starts."""
        for name in (
            *("num_steps", "max_sequence_tokens", "sequences_per_step", "eval_every_steps"),
            *("replicas", "timeout_s", "max_grad_norm"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be positive and finite")
        for name in ("learning_rate", "weight_decay", "seed", "num_warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be finite and not negative")
        # -- shared: betas check --
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise ValueError(
                f"--adam_beta1={self.adam_beta1} and --adam_beta2={self.adam_beta2} "
                "must be in [0, 1)"
            )
        # -- end shared --
        if not self.dataset:
            raise ValueError("--dataset is required")
        if self.max_tokens_per_microbatch < self.max_sequence_tokens:
            raise ValueError(
                f"--max_tokens_per_microbatch={self.max_tokens_per_microbatch} must hold one whole "
                f"sequence: --max_sequence_tokens={self.max_sequence_tokens}"
            )


# -- shared: schedule --
def lr_factor(step: int, *, total_steps: int, warmup_steps: int, schedule: str) -> float:
    """Learning rate of optimizer step `step` (from 0), as a share of the peak."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return max(0.0, 1.0 - progress)
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return 1.0


# -- end shared --


# -- shared: data order --
def batch_indices(step: int, *, num_rows: int, rows_per_step: int, seed: int) -> list[int]:
    """Rows of step `step` (from 1): a new permutation every epoch, no row lost between epochs."""
    order: dict[int, np.ndarray] = {}
    indices: list[int] = []
    for position in range((step - 1) * rows_per_step, step * rows_per_step):
        epoch, offset = divmod(position, num_rows)
        if epoch not in order:
            order[epoch] = np.random.default_rng((seed, epoch)).permutation(num_rows)
        indices.append(int(order[epoch][offset]))
    return indices


# -- end shared --


# -- shared: memory --
def peak_memory_gb(device: torch.device) -> float:
    """Peak of this rank in GiB: allocated GPU memory, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- end shared --


def main(args: Args) -> None:
    # ---- [1] setup ----
    # -- shared: setup --
    output_dir = prepare_output_dir(args.output_dir, overwrite=args.overwrite, model=args.model)
    env = setup(timeout_s=args.timeout_s, replicas=args.replicas)
    torch.manual_seed(args.seed)
    if args.dtype == "auto":
        dtype = torch.bfloat16 if env.device.type == "cuda" else torch.float32
    else:
        dtype = getattr(torch, args.dtype)
    tokenizer = load_tokenizer(args.model)
    stop_ids = stop_token_ids(tokenizer, load_generation_config(args.model))
    # -- end shared --

    # ---- [2] data ----
    def load(paths: tuple[str, ...], split: str, flag: str) -> list[TokenRow]:
        """Sequences that fit and have something to train; what was dropped is printed."""
        rows, dropped = load_sft_rows(
            list(paths),
            tokenizer,
            max_tokens=args.max_sequence_tokens,
            system_prompt=args.system_prompt,
            prompt_format=args.prompt_format,
            split=split,
            flag=flag,
        )
        print0(f"{flag}: {len(rows)} sequences, dropped {dropped or 'none'}")
        return rows

    rows = load(args.dataset, args.dataset_split, "--dataset")
    print0(f"first sequence, trained tokens marked: {render_example(rows[0], tokenizer)}")
    eval_rows: list[TokenRow] = []
    if args.eval_dataset:
        eval_rows = load(args.eval_dataset, args.eval_split, "--eval_dataset")

    # ---- [3] models and optimizer ----
    largest_id = max(max(row.input_ids) for row in rows + eval_rows)
    # -- shared: model and optimizer --
    model = load_model(
        args.model,
        env,
        dtype=dtype,
        activation_checkpointing=args.activation_checkpointing,
    )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and args.max_sequence_tokens > context:
        raise ValueError(
            f"sequences of up to {args.max_sequence_tokens} tokens do not fit into the context of "
            f"--model={args.model}, {context} tokens"
        )
    num_embeddings = model.config.get_text_config().vocab_size
    if largest_id >= num_embeddings:
        raise ValueError(
            f"--model={args.model}: the tokenizer makes token id {largest_id}, but the model has "
            f"{num_embeddings} embeddings"
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings", math.inf)
    if rope.get("rope_type") in ("longrope", "dynamic") and args.max_sequence_tokens > original:
        raise ValueError(
            f"--model={args.model}: {rope['rope_type']} rotary embeddings depend on the longest "
            f"sequence of a batch; keep sequences within {original} tokens"
        )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_factor(
            step,
            total_steps=args.optimizer_steps,
            warmup_steps=args.num_warmup_steps,
            schedule=args.lr_schedule,
        ),
    )
    # -- end shared --

    def pack_microbatches(sequences: list[TokenRow]) -> list[PackedRow]:
        """This rank's share of the sequences, packed; the same count on every rank."""
        plan = plan_microbatches(
            [len(row.input_ids) for row in sequences],
            world_size=env.world_size,
            max_tokens=args.max_tokens_per_microbatch,
            packing=args.packing,
        )
        return [
            pack(
                members,
                [sequences[m].input_ids for m in members],
                [sequences[m].loss_mask for m in members],
            ).to(env.device)
            for members in plan[env.rank]
        ]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """Mean loss per trained token over the held-out rows."""
        start = time.perf_counter()
        nll = torch.zeros((), dtype=torch.float64, device=env.device)
        for row in pack_microbatches(eval_rows):
            logprobs, _ = compute_logprobs(model, row)
            nll -= logprobs.double().sum()
        nll = nll.cpu()
        dist.all_reduce(nll)  # collective: all ranks
        loss = nll.item() / sum(sum(row.loss_mask) for row in eval_rows)
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
    if eval_rows:
        tracker.log(0, evaluate())
    for step in range(1, args.num_steps + 1):
        step_start = time.perf_counter()
        tracker.phase("training")

        # (a) next batch: the same on every rank, each packs its share
        indices = batch_indices(
            step, num_rows=len(rows), rows_per_step=args.sequences_per_step, seed=args.seed
        )
        batch = [rows[i] for i in indices]
        # Counted once, before the first backward, over all ranks and microbatches. [D1]
        num_loss_tokens = sum(sum(row.loss_mask) for row in batch)
        microbatches = pack_microbatches(batch)

        # (e) update: one optimizer step
        loss_sum = torch.zeros((), dtype=torch.float64, device=env.device)
        entropy_sum = torch.zeros_like(loss_sum)
        for row in microbatches:
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
        num_tokens = sum(len(row.input_ids) for row in batch)
        step_s = time.perf_counter() - step_start
        metrics = {
            "policy/loss": totals[0].item(),
            "policy/entropy": totals[1].item() / num_loss_tokens,
            "policy/loss_tokens": num_loss_tokens,
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": learning_rate,
            "data/epoch": step * args.sequences_per_step / len(rows),
            "data/tokens": num_tokens,
            "time/step_s": step_s,
            "time/tokens_per_s": num_tokens / step_s,
            "memory/peak_gb": peak_memory_gb(env.device),
        }

        # (h) eval
        if eval_rows and (step % args.eval_every_steps == 0 or step == args.num_steps):
            metrics |= evaluate()
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
    tracker.finish()
    print0(f"final checkpoint: {output_dir / 'final'}")
    # -- end shared --
    shutdown()


if __name__ == "__main__":
    main(parse_args(Args))
