"""Embeddings with a `padding_idx`, whose row is used in the forward and kept out of the gradient.

A training step then follows no gradient field: its direction depends on that row's value, but has no part along it from the embedding.
Where the row moves all the same (weights tied to a head; weight decay), scores need that dependence, and differentiating the gradient
once more leaves it out a second time (5 % of the largest score for a tied model). So a *twin* of the weight, equal and a leaf of its
own, carries the row's value in the graph of a step: the step's gradient is taken without it, and the pullback with it. A query's
measurement is no step, so its derivative leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from magic_pipeline.errors import InputError


def padded_weights(module: nn.Module) -> frozenset[str]:
    """The names of trainable embedding weights that have a padding row; tied ones by their first name."""
    padded = {id(child.weight) for child in module.modules() if _is_padded(child)}
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad and id(p) in padded)


def refuse_what_is_no_gradient(module: nn.Module) -> None:
    """Raises InputError, naming it, for a trainable embedding that changes its rows or its gradients on the way."""
    for name, child in module.named_modules():
        if not isinstance(child, nn.Embedding) or not child.weight.requires_grad:
            continue
        for setting, what in (
            ("max_norm", "scales its rows in place in every forward"),
            ("scale_grad_by_freq", "divides its gradient by how often a row is used"),
            ("sparse", "gives sparse gradients, which have no derivative"),
        ):
            if getattr(child, setting):
                raise InputError(
                    f"the embedding {name!r} has {setting}={getattr(child, setting)!r}: it {what}, so the scores would be wrong; "
                    "build the model without it",
                    field="task",
                )


def _is_padded(child: nn.Module) -> bool:
    return isinstance(child, nn.Embedding) and child.padding_idx is not None


class WithTwins(TorchFunctionMode):
    """Within, the padding rows of these weights are looked up in their twins: the same values, and a dependence that counts.

    Args:
        twins: weight and twin by name.
    """

    def __init__(self, twins: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._twins = {id(weight): twin for weight, twin in twins.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return result
        indices, weight, padding = _arguments(*args, **(kwargs or {}))
        if padding is None or id(weight) not in self._twins:
            return result
        looked_up = F.embedding(indices, self._twins[id(weight)])
        is_padding = (indices == padding % len(weight)).unsqueeze(-1)
        return result + torch.where(is_padding, looked_up - looked_up.detach(), torch.zeros_like(result))


class Unpadded(TorchFunctionMode):
    """Within, embeddings have a derivative in every row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            indices, weight, _ = _arguments(*args, **(kwargs or {}))
            return F.embedding(indices, weight)
        return func(*args, **(kwargs or {}))


def _arguments(
    input: Tensor,  # noqa: A002  (torch's name of it)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Tensor, int | None]:
    """(indices, weight, padding row) of a call of torch's embedding."""
    return input, weight, padding_idx
