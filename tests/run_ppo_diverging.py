"""`python run_ppo_diverging.py KIND UPDATE FLAGS...`: ppo.py, whose UPDATE-th update goes wrong.

KIND "rate": the learning rate is 1000 times too high; "nan": the loss is NaN.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import common  # noqa: F401  isort: skip
import ppo
from common.dist import parse_args

KIND, UPDATE = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
lr_factor, policy_loss = ppo.lr_factor, ppo.policy_loss
calls = 0


def spiked(step: int, **settings: Any) -> float:
    """Scheduled rate; its step counts from 0."""
    return lr_factor(step, **settings) * (1000 if step == UPDATE - 1 else 1)


def broken(*args: Any, **settings: Any) -> Any:
    """Loss of one microbatch; with small batches that is one update."""
    global calls  # noqa: PLW0603
    calls += 1
    loss, ratio = policy_loss(*args, **settings)
    return (loss * float("nan") if calls == UPDATE else loss), ratio


if __name__ == "__main__":
    if KIND == "rate":
        ppo.lr_factor = spiked
    else:
        ppo.policy_loss = broken
    ppo.main(parse_args(ppo.Args))
