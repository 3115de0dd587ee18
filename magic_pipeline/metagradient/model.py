"""A torch module as a pure function of (params, buffers, counters), the form in which everything here sees a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.batch_norm import write_out_batch_norm
from magic_pipeline.metagradient.numerics import seeded, twice_differentiable_kernels
from magic_pipeline.metagradient.optimizers import Optimizer
from magic_pipeline.metagradient.padded_embeddings import (
    Unpadded,
    WithTwins,
    padded_weights,
    refuse_what_is_no_gradient,
)
from magic_pipeline.metagradient.state import Tensors, TrainState


@dataclass(frozen=True)
class Losses:
    """What one shard's forward gives: unreduced, unweighted losses `[rows]` or `[rows, tokens]`; buffers and counters after it."""

    losses: Tensor
    buffers: Tensors
    counters: Tensors


class FunctionalModel:
    """A module and its example losses as pure functions.

    Takes the module over: it is moved to `dtype` and `device`, its BatchNorms are written out, and its mode is set as needed. Frozen
    parameters and buffers that training leaves alone stay in the module as constants. Tied weights are one leaf.

    Args:
        module: the model.
        example_losses: `(module, batch) -> [rows]` or `[rows, tokens]`, unreduced and unweighted.
        train_mode: whether training steps run in `train()` mode (dropout, batch statistics) or in `eval()`.
        dtype: of parameters, float buffers and the batches' float tensors.
        device: where everything lives.

    Raises:
        InputError: the module has no trainable parameter, or one that is not a float of `dtype` afterwards.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        example_losses: Callable[[nn.Module, Any], Tensor],
        train_mode: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype, self.device, self.train_mode = dtype, torch.device(device), train_mode
        self._example_losses = example_losses
        _switch_off_gradient_checkpointing(module)
        self.module = module.to(dtype=dtype, device=self.device)
        write_out_batch_norm(self.module)
        self.draws_randomly = train_mode and any(_drops_out(child) for child in module.modules())
        self.uses_batch_statistics = train_mode and any(
            isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules()
        )
        self.params: Tensors = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
        if not self.params:
            raise InputError("the model has no trainable parameter", field="task")
        refuse_what_is_no_gradient(self.module)
        self._padded = padded_weights(self.module)
        self._caller = _Caller(self.module)
        self._recurrent = any(isinstance(child, nn.RNNBase) for child in module.modules())
        self._tracked: frozenset[str] = frozenset()
        # The compiled engine's code by form of shard (compiled.py): good for this model alone, and dear to make.
        self.compiled: dict[str, Any] = {}

    def initial_state(self, optimizer: Optimizer, example_batch: Any) -> TrainState:
        """The state before step 0.

        Runs one forward in the training mode to find out which buffers training changes.

        Raises:
            InputError: a float buffer is changed without a gradient path (spectral_norm's u and v), by name.
        """
        everything = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        leaves = {n: b.clone().requires_grad_() if b.is_floating_point() else b.clone() for n, b in everything.items()}
        params = {n: p.clone().requires_grad_() for n, p in self.params.items()}
        refusal: RuntimeError | None = None
        with torch.enable_grad():
            try:
                _, after = self._run(params, leaves, example_batch, seed=0)
            except RuntimeError as error:
                # Autograd refuses to change a buffer in place that wants a gradient; as a constant, the buffer shows itself below.
                refusal, leaves = error, {n: b.clone() for n, b in everything.items()}
                _, after = self._run(params, leaves, example_batch, seed=0)
        changed = [n for n in everything if after[n] is not leaves[n] or not torch.equal(after[n], everything[n])]
        floats = [n for n in changed if everything[n].is_floating_point()]
        for name in floats:
            if after[name] is leaves[name] or not after[name].requires_grad:
                owner = self.module.get_submodule(name.rpartition(".")[0])
                raise InputError(
                    f"training changes the buffer {name!r} of {type(owner).__name__} without a gradient path, so its part of the "
                    "scores would be silently missing; remove it or replace it by a differentiable form",
                    field="task",
                )
        if refusal is not None:
            raise refusal
        self._tracked = frozenset(changed)
        buffers = {n: everything[n] for n in floats}
        counters = {n: everything[n] for n in changed if n not in buffers}
        params_now = {n: p.clone() for n, p in self.params.items()}
        return TrainState(0, params_now, optimizer.init(params_now), buffers, counters)

    def twins(self, params: Tensors) -> dict[str, Tensor]:
        """Leaves of the same values, for the weights of embeddings with a padding row (padded_embeddings.py)."""
        return {name: params[name].detach().clone().requires_grad_() for name in sorted(self._padded)}

    def losses(
        self, params: Tensors, buffers: Tensors, counters: Tensors, batch: Any, seed: int, twins: Tensors | None = None
    ) -> Losses:
        """The example losses of one shard, differentiable in `params` and `buffers`, and in `twins` where they are given.

        Raises:
            InputError: the losses are not `[rows]` or `[rows, tokens]` of the run's dtype or have no gradient path, or a buffer
                changed that training left alone before.
        """
        untouched = self._untracked_versions()
        with WithTwins({name: (params[name], twin) for name, twin in twins.items()}) if twins else nullcontext():
            losses, after = self._run(params, {**buffers, **{n: c.clone() for n, c in counters.items()}}, batch, seed)
        moved = [name for name, version in self._untracked_versions().items() if untouched.get(name) != version]
        if moved:
            raise InputError(f"the step changed the buffer {moved[0]!r}, which the first step left alone", field="task")
        if losses.dim() not in (1, 2) or losses.dtype != self.dtype:
            raise InputError(
                f"example_losses gave {list(losses.shape)} of {losses.dtype}; expected [rows] or [rows, tokens] of {self.dtype}",
                field="task",
            )
        _require_gradient_path(losses, params, "example_losses")
        return Losses(losses, {n: after[n] for n in buffers}, {n: after[n].detach() for n in counters})

    def measurement(self, params: Tensors, buffers: Tensors, function: Callable[[nn.Module], Tensor]) -> Tensor:
        """`function(module)` with these parameters and buffers, in eval mode; differentiable in both.

        Raises:
            InputError: the result has no gradient path.
        """
        self._set_mode(False)
        padding = Unpadded() if self._padded else nullcontext()
        with twice_differentiable_kernels(recurrent=self._recurrent), padding:
            result: Tensor = functional_call(self._caller, self._named(params, buffers), (function,))
        _require_gradient_path(result, params, "the query's measurement")
        return result

    def place(self, batch: Any) -> Any:
        """The batch on the model's device, its float tensors in the model's dtype; structure kept."""
        return _map_tensors(batch, lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype))

    def _run(self, params: Tensors, buffers: Tensors, batch: Any, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        placed = self.place(batch)
        after: dict[str, Tensor] = {}

        def forward(module: nn.Module) -> Tensor:
            losses = self._example_losses(module, placed)
            # Read here, while the swapped and the newly assigned buffers are still in the module.
            after.update((name, tensor) for name, tensor in module.named_buffers() if name in buffers)
            return losses

        self._set_mode(self.train_mode)
        with twice_differentiable_kernels(recurrent=self._recurrent), seeded(seed, self.device):
            losses: Tensor = functional_call(self._caller, self._named(params, buffers), (forward,))
        return losses, after

    def _named(self, *parts: Tensors) -> dict[str, Tensor]:
        return {f"module.{name}": tensor for part in parts for name, tensor in part.items()}

    def _set_mode(self, train: bool) -> None:
        if self.module.training != train:
            self.module.train(train)

    def _untracked_versions(self) -> dict[str, tuple[int, int]]:
        return {n: (id(b), b._version) for n, b in self.module.named_buffers() if n not in self._tracked}


class _Caller(nn.Module):
    """Calls a function with the module, so that functional_call swaps tensors around any code that uses it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], Tensor]) -> Tensor:
        return function(self.module)


def _require_gradient_path(result: Tensor, params: Tensors, name: str) -> None:
    """Refuses a result that cannot be differentiated where derivatives are wanted."""
    wanted = torch.is_grad_enabled() and any(p.requires_grad for p in params.values())
    if wanted and not result.requires_grad:
        raise InputError(
            f"{name} gave a result without a gradient path to the parameters (no_grad, inference_mode, detach, or a constant)",
            field="task",
        )


def _map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(value, function) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, function) for value in tree)
    return tree


def _drops_out(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    # Recurrent nets and attention hold their dropout as a number.
    return (
        float(getattr(module, "dropout", 0.0) if isinstance(getattr(module, "dropout", 0.0), float | int) else 0.0) > 0
    )


def _switch_off_gradient_checkpointing(module: nn.Module) -> None:
    """Under functional_call, checkpointing recomputes with the module's own parameters and is silently wrong."""
    for child in module.modules():
        if getattr(child, "gradient_checkpointing", False) is True:
            child.gradient_checkpointing = False  # type: ignore[assignment]
