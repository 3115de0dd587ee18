"""A copy of a module into which a caller puts tensors that carry gradients: parameters and buffers alike."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Replica:
    """Guarantee: `module` computes with exactly the tensors that were last given to `place`, tied ones in every place.

    Attributes:
        module: the copy; its trainable parameters are plain tensors, BatchNorm runs by formula.
        params: the trainable leaves at the start, tied ones once, under their first name.
        buffers: every buffer at the start.
    """

    def __init__(self, original: nn.Module) -> None:
        self.module = copy.deepcopy(original).double()
        self._homes: dict[str, list[tuple[nn.Module, str]]] = {}
        self.params: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {name: value.clone() for name, value in self.module.named_buffers()}
        names: dict[int, str] = {}
        for prefix, owner in self.module.named_modules():
            if isinstance(owner, _BatchNorm):
                owner.forward = partial(batch_norm, owner)  # type: ignore[method-assign]
            for attribute, value in list(owner._parameters.items()):
                if value is None or not value.requires_grad:
                    continue
                name = names.setdefault(id(value), f"{prefix}.{attribute}".lstrip("."))
                self._homes.setdefault(name, []).append((owner, attribute))
                self.params.setdefault(name, value.detach().clone())
        for homes in self._homes.values():
            for owner, attribute in homes:
                del owner._parameters[attribute]

    def place(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
        for name, homes in self._homes.items():
            for owner, attribute in homes:
                setattr(owner, attribute, params[name])
        for name, value in buffers.items():
            prefix, _, attribute = name.rpartition(".")
            self.module.get_submodule(prefix)._buffers[attribute] = value
        return self.module

    def taken(self) -> dict[str, Tensor]:
        """The buffers as the last forward left them."""
        return dict(self.module.named_buffers())


def batch_norm(layer: _BatchNorm, batch: Tensor) -> Tensor:
    """Ioffe & Szegedy's formulas; running statistics are new tensors with a gradient path, never changed in place."""
    over = [axis for axis in range(batch.dim()) if axis != 1]
    shape = [1, -1] + [1] * (batch.dim() - 2)
    mean, variance = batch.mean(over), batch.var(over, unbiased=False)
    buffers = layer._buffers
    old_mean, old_variance, count = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    if old_mean is not None and old_variance is not None and count is not None:
        if layer.training:
            rows = batch.numel() // batch.shape[1]
            share = 1.0 / float(count + 1) if layer.momentum is None else layer.momentum
            buffers["num_batches_tracked"] = count + 1
            buffers["running_mean"] = (1 - share) * old_mean + share * mean
            buffers["running_var"] = (1 - share) * old_variance + share * variance * rows / (rows - 1)
        else:
            mean, variance = old_mean, old_variance
    normal = (batch - mean.view(shape)) / torch.sqrt(variance.view(shape) + layer.eps)
    return normal * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else normal
