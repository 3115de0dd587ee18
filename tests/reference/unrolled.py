"""The whole training run as one autograd graph, in float64, with the example weights as a leaf.

This is the definition of a score, `d phi_q(trained state) / d w_i`, evaluated with no idea of a walk: memory grows with
the number of steps, so it is for small runs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.reference.optimizers import Slots, adamw, clip_coefficient, fresh_slots, sgd
from tests.reference.problem import AdamW, MicroBatch, Problem, denominator
from tests.reference.replica import Replica


@dataclass(frozen=True)
class State:
    """A training state on a graph; slots by parameter, then by slot name."""

    params: dict[str, Tensor]
    slots: dict[str, Slots]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A differentiable training run.

    Attributes:
        trained: the state after the last step; every tensor hangs on the weights.
        losses: each step's weighted loss.
        coefficients: each step's clip coefficient, 1.0 where nothing was clipped.
    """

    trained: State
    losses: list[float]
    coefficients: list[float]


def initial_state(problem: Problem, replica: Replica) -> State:
    slots = {name: fresh_slots(problem.optimizer, value) for name, value in replica.params.items()}
    return State({name: value.requires_grad_() for name, value in replica.params.items()}, slots, replica.buffers)


def gradient(
    problem: Problem, replica: Replica, state: State, buffers: Mapping[str, Tensor], part: MicroBatch, weights: Tensor
) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """One micro-batch's gradient of the weighted loss sum, differentiable; the buffers it leaves; its loss sum.

    Backward does not go into the forwards before, so the buffers that a micro-batch starts from are constants to *its*
    gradient, though they depend on the same parameters: hence parameters of its own.
    """
    params = {name: value.view_as(value) for name, value in state.params.items()}
    module = replica.place(params, buffers).train(problem.train_mode)
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(part.seed)
        losses = problem.example_losses(module, part.batch)
    loss = (weights[part.units] * losses).sum()
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        loss, list(params.values()), create_graph=True, allow_unused=True
    )
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]
    return filled, replica.taken(), loss.item()


def one_step(
    problem: Problem, replica: Replica, state: State, step: int, weights: Tensor
) -> tuple[State, float, float]:
    """The state after step number `step`, on the graph; the step's loss and clip coefficient."""
    parts, lr = problem.steps[step], problem.learning_rates[step]
    total, buffers, loss = [torch.zeros_like(value) for value in state.params.values()], state.buffers, 0.0
    for part in parts:
        grads, buffers, part_loss = gradient(problem, replica, state, buffers, part, weights)
        total = [a + b / denominator(parts) for a, b in zip(total, grads, strict=True)]
        loss += part_loss / denominator(parts)
    coefficient = 1.0
    if problem.clip_norm is not None:
        factor = clip_coefficient(total, problem.clip_norm)
        total, coefficient = [factor * grad for grad in total], factor.item()
    params, slots = {}, {}
    for (name, value), grad in zip(state.params.items(), total, strict=True):
        if isinstance(problem.optimizer, AdamW):
            params[name], slots[name] = adamw(problem.optimizer, value, state.slots[name], grad, lr, step)
        else:
            params[name], slots[name] = sgd(problem.optimizer, value, state.slots[name], grad, lr)
    return State(params, slots, buffers), loss, coefficient


def unroll(problem: Problem, weights: Tensor) -> Run:
    """Train with `weights`, keeping the graph of everything."""
    replica = Replica(problem.build())
    state, losses, coefficients = initial_state(problem, replica), [], []
    for step in range(len(problem.steps)):
        state, loss, coefficient = one_step(problem, replica, state, step, weights)
        losses.append(loss)
        coefficients.append(coefficient)
    return Run(state, losses, coefficients)


def unrolled_scores(problem: Problem) -> Tensor:
    """`scores: [units, queries]`, float64."""
    weights = problem.weights.requires_grad_()
    trained = unroll(problem, weights).trained
    module = Replica(problem.build()).place(trained.params, trained.buffers).eval()
    columns = []
    for measurement in problem.measurements:
        with sdpa_kernel(SDPBackend.MATH):
            phi = measurement(module)
        columns.append(torch.autograd.grad(phi, weights, retain_graph=True)[0])
    return torch.stack(columns, dim=1)
