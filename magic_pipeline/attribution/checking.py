"""What is checked before training, so that a run that cannot end well costs seconds and not hours."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from magic_pipeline.attribution.fragility import kinks_of, warnings_before_training
from magic_pipeline.attribution.opening import OpenExperiment, measure, naming_its_file
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.probe import ProbeReport, probe
from magic_pipeline.metagradient.step import train_step
from magic_pipeline.tasks.datasets import content_digest

logger = logging.getLogger("magic_pipeline.attribution")

# A float64 copy with its graph takes about this many times the parameters' bytes; above the limit the probe stays in float32.
_PROBE_LIMIT_BYTES = 2 * 1024**3


def check_before_training(opened: OpenExperiment) -> None:
    """The determinism of the data, one step, every query's measurement, and the numerical probe, by the leading process.

    Raises:
        InputError: naming what is wrong.
        NonFiniteError: the first step's loss or gradient is NaN or infinite.
    """
    with naming_its_file(opened.experiment):
        if opened.board.leads:
            _check_determinism(opened)
        _check_initial_weights(opened)
        # Shapes, dtypes and finiteness of the losses, found before anything is sealed.
        train_step(opened.recipe, opened.initial_state, opened.data(0))
        _check_smallest_shard(opened)
        if opened.board.leads:
            for warning in warnings_before_training(opened, kinks_of(opened)):
                logger.warning("%s", warning)
            _check_places(opened)
            _check_queries(opened)
            check_model(opened)
    opened.board.collect(None)


def check_model(opened: OpenExperiment) -> ProbeReport:
    """The numerical probe. Raises InputError."""
    state, model = opened.initial_state, opened.recipe.model
    bytes_in_float64 = 8 * sum(tensor.numel() for tensor in state.params.values())
    first = opened.queries[0].query

    def measurement(module: nn.Module, place: Any) -> torch.Tensor:
        return measure(opened.task, module, first, place)

    report = probe(
        opened.module,
        opened.data(0)[0],
        example_losses=opened.task.example_losses,
        measurement=measurement,
        train_mode=model.train_mode,
        dtype=torch.float64 if bytes_in_float64 < _PROBE_LIMIT_BYTES else torch.float32,
        device=model.device,
    )
    worst = max(report.errors, key=lambda name: report.errors[name])
    logger.info("probe: %s is at most %.1e off central differences", worst, report.errors[worst])
    if report.inconclusive:
        logger.warning(
            "the probe could not check %s: central differences in %s say nothing about a model with kinks (ReLU) or too little "
            "precision; try training.dtype: float64 on a small copy of the model",
            ", ".join(report.inconclusive),
            report.dtype,
        )
    if not report.batchable:
        logger.warning("an operation of the model cannot be batched over queries: they are pulled back one at a time")
    return report


def _check_determinism(opened: OpenExperiment) -> None:
    indices = opened.order[0][:2]
    examples = [opened.dataset[index] for index in indices]
    again = [opened.dataset[index] for index in indices]
    if content_digest(opened.task.collate(examples)) != content_digest(opened.task.collate(again)):
        raise InputError(
            f"the same examples ({', '.join(opened.dataset.ids[i] for i in indices)}) gave two different batches; "
            "the dataset and collate must be deterministic (draw from a generator seeded by the example)",
            field="task",
        )


def _check_initial_weights(opened: OpenExperiment) -> None:
    """Training would end at its first step, and say no more than that its loss is NaN."""
    state = opened.initial_state
    for name, tensor in (*state.params.items(), *state.buffers.items()):
        if not bool(tensor.isfinite().all()):
            raise InputError(f"the model's {name!r} is not finite before training", field="init or task")


def _check_smallest_shard(opened: OpenExperiment) -> None:
    """What is left of the examples at an epoch's end may be one, which has no statistics: not to be found out by then."""
    size = opened.experiment.training.microbatch_size

    def smallest(step: int) -> int:
        rows = len(opened.order[step])
        return rows if size is None else rows % size or size

    if opened.recipe.model.uses_batch_statistics:
        train_step(opened.recipe, opened.initial_state, opened.data(min(range(opened.steps), key=smallest)))


def _check_places(opened: OpenExperiment) -> None:
    """A loss that belongs to no token or document would be in the training and in no score."""
    state = opened.initial_state
    for shard in opened.data(0)[:1]:
        if shard.score_places.dim() == 2:
            with torch.no_grad():
                losses = opened.recipe.model.losses(
                    state.params, state.buffers, state.counters, shard.batch, shard.seed
                ).losses
            homeless = (shard.score_places < 0).to(losses.device)
            if bool((losses[homeless] != 0).any()):
                raise InputError(
                    f"a loss in the first batch is not 0 where the batch has no {opened.scored.kind} (padding): its part would be "
                    "in no score",
                    field="task",
                )


def _check_queries(opened: OpenExperiment) -> None:
    state = opened.initial_state
    with torch.no_grad():
        for query in opened.queries:
            value = float(opened.phi(query, state.params, state.buffers))
            if value != value or value in (float("inf"), float("-inf")):
                raise InputError(f"its measurement of the untrained model is {value}", field=f"query {query.id!r}")
