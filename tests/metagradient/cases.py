"""The settings that the checks are run over, listed once."""

from __future__ import annotations

from typing import Any

from tests.reference import families
from tests.reference.problem import SGD, AdamW

OPTIMIZERS: dict[str, SGD | AdamW] = {
    "sgd": SGD(),
    "sgd-momentum-decay": SGD(momentum=0.9, weight_decay=0.05),
    "sgd-nesterov-decay": SGD(momentum=0.8, nesterov=True, weight_decay=0.05),
    "adamw": AdamW(),
    "adamw-no-eps-root": AdamW(eps_root=0.0, weight_decay=0.1),
    "adamw-coarse-eps": AdamW(betas=(0.8, 0.95), eps=1e-3, eps_root=1e-4, weight_decay=0.0),
}

FAMILIES: dict[str, families.Family] = {
    "mlp": families.mlp(batch_size=5),
    "mlp-dropout": families.mlp(dropout=0.3, batch_size=5),
    "conv-batchnorm": families.conv_net(),
    "gpt2-tied": families.gpt2(),
    "gpt2-dropout": families.gpt2(dropout=0.2),
}

CLIPS = (None, 0.5)
MICRO_BATCHES = (1, 2, 4)


def parameters(family: str) -> list[Any]:
    """(optimizer name, clip norm, micro-batches) for the whole-walk comparison of one family.

    The small MLP meets every optimizer; the others meet SGD and AdamW; the slowest is always clipped. The conv net's
    convolution has a bias whose gradient is only rounding, which Adam without eps_root would blow up, in the reference
    as anywhere else.
    """
    names = OPTIMIZERS if family == "mlp" else ("sgd-nesterov-decay", "adamw")
    clips = CLIPS[1:] if family == "gpt2-dropout" else CLIPS
    return [(name, clip, micro) for name in names for clip in clips for micro in MICRO_BATCHES]
