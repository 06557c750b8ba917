"""Launched by test_scores.py: vLLM's scores of prompts, by two exported reward models."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import json
import sys

from vllm import LLM
from vllm.config import PoolerConfig


def main() -> None:
    """Read {folder: [prompt ids, logit mean]} and print {folder: scores}, as JSON."""
    scores: dict[str, list[float]] = {}
    for path, (prompts, logit_mean) in json.loads(sys.argv[1]).items():
        engine = LLM(
            model=path,
            runner="pooling",
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=2**22,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            pooler_config=PoolerConfig(logit_mean=logit_mean),
        )
        outputs = engine.classify([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
        scores[path] = [value for output in outputs for value in output.outputs.probs]
        engine.llm_engine.engine_core.shutdown()
    print(json.dumps(scores))


if __name__ == "__main__":  # vLLM looks at model classes in a child process
    main()
