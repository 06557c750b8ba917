"""What every test shares: the scripts' environment, no network, and the `gpu` marker."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import os

import pytest

# A test that looks for a name on a hub or starts a tracker should fail now, not after a time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
