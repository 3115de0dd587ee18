"""An experiment opened: its task, model, data order, fingerprint and store, with everything checked that can be checked now.

Opening reads and checks; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from magic_pipeline.attribution.board import Board, OwnBoard
from magic_pipeline.attribution.data_order import Order, batch_order, read_numbers
from magic_pipeline.attribution.experiment import Experiment, recipe_content
from magic_pipeline.attribution.experiment_settings import TableSchedule
from magic_pipeline.attribution.layout import Layout
from magic_pipeline.attribution.optimizer import optimizer_of
from magic_pipeline.attribution.queries import partition_keys
from magic_pipeline.attribution.queries_file import local_queries_file
from magic_pipeline.attribution.units import Units, find_units
from magic_pipeline.checkpoints.chain import Chain
from magic_pipeline.checkpoints.digests import fingerprint, tensors_digest
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.numerics import shard_seed
from magic_pipeline.metagradient.ranks import Alone, Gang, Ranks
from magic_pipeline.metagradient.schedules import learning_rates
from magic_pipeline.metagradient.state import TrainState
from magic_pipeline.metagradient.step import Data, Recipe, Shard
from magic_pipeline.tasks import protocol
from magic_pipeline.tasks.datasets import content_digest
from magic_pipeline.tasks.protocol import Dataset, Query, QuerySource, Task

SCHEMA = 1


@dataclass(frozen=True)
class OpenQuery:
    """A query with its partition key and digests.

    Attributes:
        digest: of the walk's identity: the query's content and, unless it is example, the unit of the scores.
        measured: of the content alone, which the trained model is asked for.
    """

    id: str
    key: str
    digest: str
    measured: str
    query: Query


@dataclass(frozen=True)
class OpenExperiment:
    """Everything that training, walks and reports of one experiment share.

    Attributes:
        recipe: how to make every step.
        initial_state: the state before step 0.
        order: the example indices of every step.
        dataset: the training examples.
        scored: what gets a score of its own.
        queries: in the task's order.
        fingerprint: sha256 of all that changes the trained model's numbers; `facts` in readable form.
    """

    experiment: Experiment
    task: Task
    module: nn.Module
    recipe: Recipe
    initial_state: TrainState
    order: Order
    dataset: Dataset
    scored: Units
    queries: tuple[OpenQuery, ...]
    store: Store
    fingerprint: str
    facts: Mapping[str, Any]
    board: Board = field(default_factory=OwnBoard)

    @property
    def ranks(self) -> Ranks:
        """The logical ranks, and which of them are this process's."""
        return self.recipe.ranks

    @property
    def units(self) -> tuple[str, ...]:
        """The ids that get a row of a score table each, in the order of their first appearance."""
        return self.scored.ids

    def units_of_example(self, index: int) -> list[int]:
        """The rows of a score table that an example's losses belong to: one, or those of a packed row's documents."""
        if self.scored.kind != "document":
            return [int(self.scored.row_of[index])]
        batch = self.task.collate([self.dataset[index]])
        units, _ = self.scored.of_batch(self.task, [index], batch, 0)
        return sorted({int(unit) for unit in units.flatten() if unit >= 0})

    @property
    def weighted(self) -> str:
        """The training fingerprint, and what retrainings weigh: the same examples with any unit but document."""
        if self.scored.kind != "document":
            return self.fingerprint
        return fingerprint({"training": self.fingerprint, "unit": "document"})

    @property
    def steps(self) -> int:
        return len(self.order)

    @property
    def layout(self) -> Layout:
        return Layout(self.experiment.storage_folder, self.fingerprint)

    @property
    def folder(self) -> str:
        return self.layout.root

    @cached_property
    def trajectory_chain(self) -> Chain:
        return Chain(self.store, self.layout.trajectory, writers=self.layout.writers)

    def query_chain(self, query: OpenQuery) -> Chain:
        return Chain(self.store, self.layout.query(query.key, query.digest), writers=self.layout.writers)

    def query(self, key: str) -> OpenQuery:
        """The query of a partition key.

        Raises:
            InputError: the experiment has no such query.
        """
        for query in self.queries:
            if query.key == key:
                return query
        raise InputError(f"the experiment {self.experiment.name} has no query with the key {key!r}", field="queries")

    def data(self, step: int) -> tuple[Shard, ...]:
        """The shards of a step: its batch cut into micro-batches as the experiment file says now."""
        return self.shards(step, self.experiment.training.microbatch_size)

    def data_split_by(self, microbatch_size: int | None) -> Data:
        """The shards of every step, cut as a sealed plan says; None takes a batch whole."""
        return lambda step: self.shards(step, microbatch_size)

    def shards(self, step: int, microbatch_size: int | None) -> tuple[Shard, ...]:
        """This process's shards of a step: each of its ranks' part of the batch, cut into micro-batches.

        A rank's part is a range of the batch, empty for the last ranks of a batch with fewer rows than ranks. The score rows of its
        examples lie in the rank's own block (`score_rows`).
        """
        batch, shards = self.order[step], list[Shard]()
        for position, rank in enumerate(self.ranks.hosted):
            start, stop = (-(-end * len(batch) // self.ranks.count) for end in (rank, rank + 1))
            part = batch[start:stop]
            size = microbatch_size or max(1, len(part))
            for number, at in enumerate(range(0, len(part), size)):
                shards.append(self._shard(step, rank, position, number, part[at : at + size]))
        return tuple(shards)

    @property
    def score_rows(self) -> int:
        """Length of this process's score accumulators: one block of all places for each rank that it hosts."""
        return len(self.ranks.hosted) * self.scored.places

    def phi(self, query: OpenQuery, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Tensor:
        """The query's measurement [], differentiable in params and buffers; eval mode, batches of its own."""
        whole: Tensor = sum(part() for part in self.phi_parts(query, params, buffers))  # type: ignore[assignment]
        return whole

    def phi_parts(
        self, query: OpenQuery, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> list[Callable[[], Tensor]]:
        """What adds up to `phi`, by batches of `queries.examples_at_once` examples: so that only one of them needs memory at a time."""
        model, parts = (
            self.recipe.model,
            protocol.parts(self.task, query.query, self.experiment.queries.examples_at_once),
        )

        def part(of: Query) -> Tensor:
            return model.measurement(params, buffers, lambda module: measure(self.task, module, of, model.place))

        return [partial(part, of) for of in parts]

    def _shard(self, step: int, rank: int, position: int, number: int, indices: Sequence[int]) -> Shard:
        batch = self.task.collate([self.dataset[index] for index in indices])
        units, places = self.scored.of_batch(self.task, indices, batch, position)
        return Shard(
            batch=batch,
            units=units,
            denominator=protocol.denominator(self.task, batch),
            seed=shard_seed(self.experiment.training.seed, step, rank, number),
            rank=rank,
            places=places,
        )


def measure(task: Task, module: nn.Module, query: Query, place: Any) -> Tensor:
    """phi of a query with its batch placed on the model's device and in its dtype."""
    value = protocol.query_measurement(task, module, query, place)
    if value.dim() != 0:
        raise InputError(f"the measurement gave {list(value.shape)}; expected a scalar", field=f"query {query.id!r}")
    return value


def open_experiment(experiment: Experiment, *, gang: Gang | None = None, board: Board | None = None) -> OpenExperiment:
    """Builds the task, the model and the data order, and computes the fingerprint.

    Args:
        gang, board: of a process among several (gang.py); by default this process works alone, on all ranks.

    Raises:
        InputError: anything in the experiment, its files, its task or its queries is wrong.
    """
    with torch.random.fork_rng(devices=[]), naming_its_file(experiment):
        return _open(experiment, gang or Alone(), board or OwnBoard())


@contextmanager
def naming_its_file(experiment: Experiment) -> Iterator[None]:
    """Within, what is wrong and names no file of its own names the experiment's."""
    try:
        yield
    except InputError as error:
        if experiment.path is None or error.file is not None:
            raise
        raise error.in_file(experiment.path) from error


def _open(experiment: Experiment, gang: Gang, board: Board) -> OpenExperiment:
    training, queries_setting = experiment.training, experiment.queries
    source = None
    if queries_setting.file is not None or queries_setting.split is not None:
        file = local_queries_file(experiment)
        source = QuerySource(file=file, split=queries_setting.split, count=queries_setting.count)
    task = protocol.load_task(experiment.task.type, experiment.task.settings, folder=experiment.folder, queries=source)
    torch.manual_seed(training.seed)
    module = task.build_model()
    if experiment.init is not None:
        load_initial_weights(module, experiment.resolve(experiment.init))
    dataset = task.training_data()
    order = batch_order(experiment, len(dataset))
    model = FunctionalModel(
        _copy(module),
        example_losses=task.example_losses,
        train_mode=training.mode == "train",
        dtype=getattr(torch, training.dtype),
        device=choose_device(experiment.device),
    )
    ranks = Ranks(experiment.ranks, gang)
    optimizer = optimizer_of(training.optimizer, model, experiment.ranks)
    recipe = Recipe(model, optimizer, _learning_rates(experiment, len(order)), training.clip_norm, ranks)
    first = task.collate([dataset[index] for index in order[0][: training.microbatch_size or len(order[0])]])
    initial = model.initial_state(recipe.optimizer, first)
    facts = _training_facts(experiment, task, recipe, initial, dataset, order)
    if ranks.count > 1:
        initial = _divided(initial, recipe)
    return OpenExperiment(
        experiment=experiment,
        task=task,
        module=module,
        recipe=recipe,
        initial_state=initial,
        order=order,
        dataset=dataset,
        scored=find_units(task, dataset, experiment.attribution.unit),
        queries=_open_queries(task, experiment),
        store=Store(experiment.storage_url, options=experiment.storage_options or None),
        fingerprint=fingerprint(facts),
        facts=facts,
        board=board,
    )


def _divided(initial: TrainState, recipe: Recipe) -> TrainState:
    """The state with the optimizer's slots divided over the ranks."""
    if initial.buffers or initial.counters:
        name = next(iter({**initial.buffers, **initial.counters}))
        raise InputError(
            f"training changes the model's buffer {name!r} (batch statistics), which ranks would have to agree on; "
            "take ranks: 1, or a model without such buffers",
            field="ranks",
        )
    return replace(initial, slots=recipe.optimizer.init(recipe.ranks.cut(initial.params)))


def _copy(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


def choose_device(wanted: str) -> torch.device:
    """The one place where the device is chosen.

    Raises:
        InputError: a GPU is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("cuda is asked for, but torch finds no GPU", field="device")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _learning_rates(experiment: Experiment, steps: int) -> tuple[float, ...]:
    settings, lr = experiment.training.schedule, experiment.training.optimizer.lr
    if not isinstance(settings, TableSchedule):
        return learning_rates(lr=lr, steps=steps, **settings.model_dump())
    file = experiment.resolve(settings.values)
    values = read_numbers(file, "training.schedule.values")
    if not isinstance(values, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise InputError("should hold one number per training step", file=file, field="training.schedule.values")
    return learning_rates("table", lr=lr, steps=steps, values=values)


def load_initial_weights(module: nn.Module, file: Path) -> None:
    """Copies a `.pt`, `.safetensors` or `.npz` file of parameters and buffers into the module; tied weights may be given once.

    Raises:
        InputError: a name or shape does not fit, or a trainable parameter is missing.
    """
    weights = _read_weights(file)
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    unknown = sorted(weights.keys() - own.keys())
    if unknown:
        raise InputError(f"{unknown[0]!r} is no parameter or buffer of the model", file=file, field="init")
    given = {id(own[name]) for name in weights}
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in given]
    if missing:
        raise InputError(
            f"the trainable parameter {missing[0]!r} is missing (of {len(missing)})", file=file, field="init"
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise InputError(
                f"{name!r} should have the shape {list(own[name].shape)}, found {list(value.shape)}",
                file=file,
                field="init",
            )
        with torch.no_grad():
            # Replaced, not copied into: a float64 weight must not pass through a float32 model on its way to a float64 run.
            own[name].data = value.to(own[name].device) if value.is_floating_point() else value.to(own[name])


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".npz":
            import numpy as np

            with np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise InputError("needs the package safetensors, part of the extra hf", file=file, field="init") from error
    except Exception as error:
        raise InputError(f"cannot be read as {file.suffix}: {error}", file=file, field="init") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError("should hold a state dict: names and tensors", file=file, field="init")
    return content


def _training_facts(
    experiment: Experiment, task: Task, recipe: Recipe, initial: TrainState, dataset: Dataset, order: Order
) -> dict[str, Any]:
    model = recipe.model
    random = model.draws_randomly
    content = recipe_content(experiment, split_matters=random or model.uses_batch_statistics)
    content["task"]["version"] = str(getattr(task, "version", "1"))
    content |= {
        "schema": SCHEMA,
        "initial_weights": tensors_digest(initial.flat() | _constants(model)),
        "data": dataset.digest,
        "order": fingerprint({"batches": order}),
        "learning_rates": fingerprint({"values": recipe.learning_rates}),
    }
    if random:
        # CPU and CUDA draw different numbers from one seed.
        content["device_kind"] = model.device.type
    return content


def _constants(model: FunctionalModel) -> dict[str, Tensor]:
    """Frozen parameters and buffers: they are in no state but change its numbers."""
    named = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    return {f"constants/{name}": tensor.detach() for name, tensor in named.items() if name not in model.params}


def _open_queries(task: Task, experiment: Experiment) -> tuple[OpenQuery, ...]:
    default, unit = experiment.queries.measurement, experiment.attribution.unit
    queries = [replace(query, measurement=query.measurement or default) for query in task.queries()]
    keys = partition_keys(query.id for query in queries)
    opened = []
    for query in queries:
        protocol.find_measurement(task, query)
        content = {"batch": task.collate(query.examples), "coefficients": list(query.coefficients)}
        if query.measurement is not None:
            content["measurement"] = query.measurement
        measured = content_digest(content)[:32]
        # Scores by another unit are another walk over the same trajectory (docs/decisions/013-units.md).
        digest = measured if unit == "example" else content_digest({"query": measured, "unit": unit})[:32]
        opened.append(OpenQuery(query.id, keys[query.id], digest, measured, query))
    return tuple(opened)
