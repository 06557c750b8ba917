"""In-process rollout engine: token ids in; sampled token ids and their log-probs out.

Two backends behind the same methods: vLLM, and a short `transformers` sampling loop for machines
that vLLM does not support. An engine starts without usable weights; weight_sync.py brings them.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

from common.weight_sync import prove_complete, reload_vllm, unique


@dataclass
class Completion:
    """One sampled response."""

    response_ids: list[int]
    """sampled token ids, the stop token included"""
    rollout_logprobs: list[float]
    """of `response_ids`, under the distribution they were drawn from (temperature, top_p)"""
    truncated: bool
    """True iff no stop token was sampled within max_tokens"""


@dataclass(frozen=True)
class _Sampling:
    """What all requests of one `generate` have in common."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: list[int]


class Engine:
    """What the two backends share: checks, random state, and the rule "no weights, no samples"."""

    dtype: torch.dtype
    """dtype of the engine's weights, in which a sync sends them"""
    needs_lm_head_alias: bool = False
    """True iff tied embeddings must also be sent as `lm_head.weight`"""

    def __init__(self, *, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.device = device
        self._has_weights = False

    def generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stop_token_ids: list[int],
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion per prompt; repeat a prompt to get several.

        Whatever the checkpoint's generation_config says is ignored: no penalties, no top-k, no
        min-p, and only `stop_token_ids` end a response.

        Args:
            prompt_ids: token ids of each prompt, at least one; may be an empty list of prompts.
            seeds: one per prompt, 0 <= seed < 2**32 (torch's CPU generator drops higher bits).
                Equal seeds draw equal noise, even for different prompts, so make them distinct.
            max_tokens: longest response; prompt + max_tokens must fit into the engine's context.
            temperature: divides the logits; 0 is greedy, whose log-probs are at temperature 1.
            top_p: nucleus; below 1 the log-probs are of the renormalised nucleus.
            stop_token_ids: ids that end a response.
            on_progress: called with the number of finished responses whenever it grows.

        Returns:
            Completions in the order of the prompts.

        Raises:
            ValueError: a prompt is empty or does not fit, or a seed is out of range.
            RuntimeError: no weights were loaded since the engine was built or put to sleep.
        """
        if not self._has_weights:
            raise RuntimeError("the engine has no weights yet: sync them before generating")
        assert len(prompt_ids) == len(seeds), (len(prompt_ids), len(seeds))
        for ids in prompt_ids:
            if not 0 < len(ids) <= self.max_model_len - max_tokens:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens and a response of {max_tokens} do not fit into "
                    f"the engine's {self.max_model_len} tokens"
                )
        if not all(0 <= seed < 2**32 for seed in seeds):
            raise ValueError("seeds must be in [0, 2**32)")
        with _preserve_rng(self.device):
            completions = self._generate(
                prompt_ids,
                seeds,
                _Sampling(max_tokens, temperature, top_p, stop_token_ids),
                on_progress or (lambda finished: None),
            )
        for completion in completions:
            assert len(completion.response_ids) == len(completion.rollout_logprobs)
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight, and drop what was cached under the old ones.

        Args:
            named_tensors: (Hugging Face name, full tensor), consumed one at a time.

        Raises:
            RuntimeError: names the engine's parameters of which elements are missing, and the
                tensors that the engine has no place for. The engine is unusable afterwards.
        """
        self._has_weights = False
        self._load_weights(unique(named_tensors))
        self._has_weights = True

    def _generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: _Sampling,
        on_progress: Callable[[int], None],
    ) -> list[Completion]:
        raise NotImplementedError

    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache; no-op on CPU."""

    def wake_weights(self) -> None:
        """Allocate memory for the weights again, before they are synced; no-op on CPU."""

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again, after the weights are synced; no-op on CPU."""

    def close(self) -> None:
        """Shut the engine down. Destroys the default process group where vLLM does so."""


def build_engine(
    model_path: str,
    *,
    backend: Literal["vllm", "transformers"],
    dtype: Literal["float32", "bfloat16"],
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel: int,
    seed: int,
    kv_cache_bytes: int,
    gpu_memory_utilization: float,
    device: torch.device,
) -> Engine:
    """Build the rollout engine of this rank.  # collective: all ranks, default group initialised

    The random state of the process is left as it was.

    Args:
        model_path: folder or hub name; only the config is read, weights come from a sync.
        backend: "vllm", or "transformers" (slower, runs wherever torch does).
        dtype: of weights, activations and KV cache.
        max_model_len: longest prompt + response, in tokens.
        max_num_seqs: sequences decoded at once; more are queued.
        tensor_parallel: neighbouring ranks that share one engine (they must pass equal requests).
        seed: of the engine; requests bring their own.
        kv_cache_bytes: size of the KV cache on CPU.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache on CUDA.
        device: of this rank.

    Raises:
        ValueError: the backend cannot serve the model or a setting; names the flag.
    """
    config = AutoConfig.from_pretrained(model_path)
    with _preserve_rng(device):
        if backend == "transformers":
            if tensor_parallel != 1:
                raise ValueError(
                    f"--engine_tensor_parallel={tensor_parallel} needs --engine=vllm; "
                    "the transformers engine runs on one device"
                )
            return TransformersEngine(
                config,
                dtype=getattr(torch, dtype),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                device=device,
            )
        with _preserve_process_settings():
            return VllmEngine(
                model_path,
                config,
                dtype=getattr(torch, dtype),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                tensor_parallel=tensor_parallel,
                seed=seed,
                kv_cache_bytes=kv_cache_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                device=device,
            )


class VllmEngine(Engine):
    """vLLM inside the trainer's process. Ranks need not generate in step (except within one TP)."""

    def __init__(
        self,
        model_path: str,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_seqs: int,
        tensor_parallel: int,
        seed: int,
        kv_cache_bytes: int,
        gpu_memory_utilization: float,
        device: torch.device,
    ) -> None:
        super().__init__(dtype=dtype, max_model_len=max_model_len, device=device)
        assert dist.is_initialized(), "vLLM joins the trainer's process group"
        cuda = device.type == "cuda"
        if not cuda:
            # Read when vLLM's sampler is imported. Without it inductor compiles a one-line helper
            # at the first generate: 11 s with a cold cache.
            from vllm.platforms import current_platform

            type(current_platform).simple_compile_backend = "eager"
        _register_model(model_path, config)
        from vllm import LLM

        on_device: dict[str, Any] = (
            dict(gpu_memory_utilization=gpu_memory_utilization, enable_sleep_mode=True)
            if cuda
            # CPU kernels: a seeded request fails in a chunked prefill, so prompts run whole.
            else dict(
                kv_cache_memory_bytes=kv_cache_bytes,
                enable_chunked_prefill=False,
                enforce_eager=True,
            )
        )
        self.llm = LLM(
            model=model_path,
            dtype=cast(Any, dtype),
            # Weights of the first sync are the first: nothing on disk can hide a failed sync.
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # neutral defaults, not those of the checkpoint
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=tensor_parallel,
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_model_len, 8192),
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **on_device,
        )
        self.needs_lm_head_alias = self.llm.apply_model(lambda model: hasattr(model, "lm_head"))[0]
        self._asleep: set[str] = set()

    def _generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: _Sampling,
        on_progress: Callable[[int], None],
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        unfinished: set[str] = set()
        completions: list[Completion | None] = [None] * len(prompt_ids)
        try:
            for index, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
                params = SamplingParams(
                    n=1,
                    seed=seed,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=0,
                    min_p=0.0,
                    presence_penalty=0.0,
                    frequency_penalty=0.0,
                    repetition_penalty=1.0,
                    ignore_eos=True,  # the caller's stop tokens are the only ones
                    stop_token_ids=sampling.stop_token_ids,
                    logprobs=0,  # of the sampled token alone
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                request_id = str(index)
                engine.add_request(request_id, TokensPrompt(prompt_token_ids=ids), params)
                unfinished.add(request_id)
            while unfinished:
                outputs: list[Any] = engine.step()
                for output in outputs:
                    sample = output.outputs[0]
                    completions[int(output.request_id)] = Completion(
                        list(sample.token_ids),
                        list(sample.logprobs.logprobs),
                        truncated=sample.finish_reason == "length",
                    )
                    unfinished.remove(output.request_id)
                if outputs:
                    on_progress(len(prompt_ids) - len(unfinished))
        finally:  # on_progress may raise; what it leaves behind must not join the next batch
            if unfinished:
                engine.abort_request(list(unfinished))
        return [completion for completion in completions if completion is not None]

    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        assert "weights" not in self._asleep, "wake_weights() comes before a sync"
        self.llm.collective_rpc(reload_vllm, args=(named_tensors,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("weights were synced while requests were running")

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache; no-op on CPU."""
        if self.device.type == "cuda" and not self._asleep:
            self._has_weights = False
            # Level 2 drops the weights instead of copying them to the host: a sync follows anyway.
            self.llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """Allocate memory for the weights again, before they are synced; no-op on CPU."""
        if "weights" in self._asleep:
            torch.cuda.empty_cache()  # vLLM needs memory that the trainer's allocator keeps cached
            self.llm.wake_up(tags=["weights"])
            self._asleep.remove("weights")

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again, after the weights are synced; no-op on CPU."""
        if "kv_cache" in self._asleep:
            assert self._has_weights, "the weights are synced before the KV cache wakes"
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep.remove("kv_cache")
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Shut vLLM down, which also destroys the default process group."""
        self.llm.llm_engine.engine_core.shutdown()


def _register_model(model_path: str, config: PretrainedConfig) -> None:
    """Prepare vLLM's own implementation of the model, or raise ValueError if it is not usable."""
    from vllm import ModelRegistry

    text_config = config.get_text_config()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    if any((getattr(text_config, name, None) or 0) > 1 for name in experts):
        raise ValueError(
            f"--model={model_path} is a mixture of experts, whose expert weights do not arrive "
            "correctly in vLLM by a sync. Use a dense model."
        )
    for name in config.architectures or []:
        implementation = ModelRegistry.models.get(name)
        class_name: str = getattr(implementation, "class_name", "")
        if implementation is None or class_name.startswith("Transformers"):
            continue
        # vLLM would import the class in another process first, to learn what it supports: 8 s more
        # at the first start of each architecture. A class that is registered needs no such detour.
        ModelRegistry.register_model(name, implementation.load_model_cls())
        return
    raise ValueError(
        f"--model={model_path}: vLLM has no {config.architectures} of its own. Its Transformers "
        "backend patches the model classes of this process, and so the model in training. "
        "Use --engine=transformers."
    )


class TransformersEngine(Engine):
    """Batched sampling with a Hugging Face model and its KV cache."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        super().__init__(dtype=dtype, max_model_len=max_model_len, device=device)
        self.max_num_seqs = max_num_seqs
        # The fused attention of torch has no soft cap (Gemma 2) and would silently leave it out.
        softcap = getattr(config, "attn_logit_softcapping", None)
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager" if softcap else "sdpa"
        )
        self.model.to(device).eval()

    @torch.inference_mode()
    def _generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: _Sampling,
        on_progress: Callable[[int], None],
    ) -> list[Completion]:
        completions = [Completion([], [], truncated=True) for _ in prompt_ids]
        # Similar lengths together: less padding.
        order = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
        finished = 0
        for start in range(0, len(order), self.max_num_seqs):
            rows = order[start : start + self.max_num_seqs]
            generators = {row: torch.Generator().manual_seed(seeds[row]) for row in rows}
            width = max(len(prompt_ids[row]) for row in rows)
            padded = [[0] * (width - len(prompt_ids[row])) + prompt_ids[row] for row in rows]
            tokens = torch.tensor(padded, device=self.device)  # (S, width) i64, left-padded
            lengths = torch.tensor([len(prompt_ids[row]) for row in rows], device=self.device)
            mask = (torch.arange(width, device=self.device) >= width - lengths[:, None]).long()
            cache = DynamicCache(config=self.model.config)
            for _ in range(sampling.max_tokens):
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
                logits = self.model(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                sampled, logprobs = _sample(
                    logits, [generators[row] for row in rows], sampling.temperature, sampling.top_p
                )
                keep: list[int] = []
                for i, (row, token, logprob) in enumerate(
                    zip(rows, sampled.tolist(), logprobs.tolist(), strict=True)
                ):
                    completion = completions[row]
                    completion.response_ids.append(token)
                    completion.rollout_logprobs.append(logprob)
                    completion.truncated = token not in sampling.stop_token_ids
                    if completion.truncated and len(completion.response_ids) < sampling.max_tokens:
                        keep.append(i)
                tokens = sampled[:, None]
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                if len(keep) < len(rows):
                    finished += len(rows) - len(keep)
                    on_progress(finished)
                    rows = [rows[i] for i in keep]
                    if not rows:
                        break
                    kept = torch.tensor(keep, device=self.device)
                    tokens, mask = tokens[kept], mask[kept]
                    cache.batch_select_indices(kept)
        return completions

    @torch.no_grad()
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        missing = dict(self.model.named_parameters())  # tied parameters once
        unused: list[str] = []
        for name, tensor in named_tensors:
            if name in missing:
                missing.pop(name).copy_(tensor)
            else:
                unused.append(name)
        prove_complete(list(missing), unused)


def _sample(
    logits: Tensor, generators: list[torch.Generator], temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """One token per row, with its log-prob under the distribution it was drawn from.

    Args:
        logits: (S, V) any float dtype.
        generators: S CPU generators, one per row, so that a row's noise does not depend on others.
        temperature: 0 takes the most likely token.
        top_p: nucleus.

    Returns:
        tokens (S,) i64 and logprobs (S,) f32.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)  # (S, V) f32
    if top_p < 1.0:
        ordered, indices = logprobs.sort(dim=-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p  # the first token always stays
        logprobs = logprobs.masked_fill(outside.scatter(1, indices, outside), float("-inf"))
        logprobs = logprobs.log_softmax(-1)
    if temperature == 0.0:
        tokens = logprobs.argmax(-1)
    else:  # exponential race: argmax of p / Exp(1) is a draw from p
        noise = torch.stack(
            [torch.empty(logits.shape[1]).exponential_(generator=g) for g in generators]
        )
        tokens = (logprobs - noise.to(logprobs.device).log()).argmax(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


@contextlib.contextmanager
def _preserve_rng(device: torch.device) -> Iterator[None]:
    """vLLM reseeds all generators when it is built and draws from torch's whenever it samples."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@contextlib.contextmanager
def _preserve_process_settings() -> Iterator[None]:
    """Undo what vLLM's worker changes in the process: thread count, its setter, environment."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    environment = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    # The external launcher reads both; a plain `python script.py` has neither.
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
