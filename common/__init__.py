"""Plumbing that two or more scripts share. Import it before torch: it sets the process environment.

Every variable is a default: what the user has exported wins.
"""

import importlib.util
import logging
import os
import warnings
from pathlib import Path

_defaults = {
    # The engine core runs inside the trainer process, so weights move without inter-process copies.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # OpenMP threads that spin while they wait make a step 5-100x slower as soon as anything else
    # runs on the cores; threads that sleep at once make it 1.3x slower on an idle machine. A short
    # spin cost 2x beside one busy process.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    # Library chatter hides our own messages; set these two to INFO when an engine does not start.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
if "OMP_WAIT_POLICY" not in os.environ:
    _defaults["GOMP_SPINCOUNT"] = "10000"
for _name, _value in _defaults.items():
    os.environ.setdefault(_name, _value)
# vLLM logs while it is being imported, before it reads its own logging level.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
# A hub that cannot be reached is one error of ours, not twenty lines about retries.
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*torch.distributed.reduce_op.*", category=FutureWarning)

# Hugging Face's optional package `kernels` has the name of our folder and would hide it.
if (_spec := importlib.util.find_spec("kernels")) and _spec.origin:
    importlib.import_module("kernels").__path__.append(
        str(Path(__file__).parent.parent / "kernels")
    )
