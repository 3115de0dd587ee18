"""BatchNorm written out, so that its running statistics are part of the differentiated state.

Stock BatchNorm updates its running statistics in place and without a gradient path, and its eval kernel has no derivative with
respect to them. A query is measured in eval mode, so scores would miss that path altogether (0.69 of the largest score in one case).
"""

from __future__ import annotations

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from magic_pipeline.errors import InputError


def write_out_batch_norm(module: nn.Module) -> None:
    """Replaces the forward of every BatchNorm inside `module` by the formula below. Parameters and buffers stay."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            # The instance's attribute shadows the class's method; the class stays as it is.
            child.forward = MethodType(_forward, child)  # type: ignore[method-assign]


def _forward(self: _BatchNorm, x: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias`, over all dimensions but the second.

    In training mean and (biased) var are the batch's, and running statistics move by `momentum` towards the batch's mean and unbiased
    variance; with `momentum=None` they are the mean over all batches so far. New running statistics are *assigned*: under
    functional_call the caller reads them back, with their gradient path.
    """
    self._check_input_dim(x)  # type: ignore[no-untyped-call]
    axes = [axis for axis in range(x.dim()) if axis != 1]
    if self.training or self.running_mean is None:
        mean = x.mean(axes)
        var = (x - _along_channels(mean, x)).square().mean(axes)
        if self.training and self.track_running_stats and self.running_mean is not None:
            _move_running_statistics(self, mean, var, x.numel() // x.shape[1])
    else:
        mean, var = self.running_mean, cast(Tensor, self.running_var)
    normalised = (x - _along_channels(mean, x)) * _along_channels(torch.rsqrt(var + self.eps), x)
    if not self.affine:
        return normalised
    return normalised * _along_channels(self.weight, x) + _along_channels(self.bias, x)


def _move_running_statistics(self: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    if count < 2:
        raise InputError(
            "BatchNorm in training needs more than one value per channel, and a batch or micro-batch of one example has one; take "
            "sizes that leave no example alone",
            field="training.batch_size",
        )
    counter = cast(Tensor, self.num_batches_tracked) + 1
    factor = 1.0 / float(counter) if self.momentum is None else self.momentum
    running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
    self.num_batches_tracked = counter
    self.running_mean = (1 - factor) * running_mean + factor * mean
    self.running_var = (1 - factor) * running_var + factor * var * (count / (count - 1))


def _along_channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.dim() - 2))
