"""The Task protocol: what a task must say so that its training can be attributed, and what it may say.

A task names five things: the model, the training data, the queries, how examples become a batch, and each example's
loss. Everything else has a default, given here as a function of the same name (`denominator`, `measurement`, ...): call
these functions rather than the methods, and a task that leaves one out is served too. Nothing here trains anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.loading import load_task
from magic_pipeline.tasks.query_source import QuerySource

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "REQUIRED_METHODS",
    "Batch",
    "Dataset",
    "Query",
    "QuerySource",
    "Task",
    "denominator",
    "find_measurement",
    "load_task",
    "measurement",
    "parts",
    "place_like",
    "query_measurement",
    "render",
    "render_document",
    "rows",
    "token_ids",
    "token_labels",
    "units",
]

Batch = Any
"""Any pytree of tensors (nested dict, list, tuple); here a dict of tensors. Rows come first in every tensor."""


class Dataset(Protocol):
    """Training examples by position, each with a stable id."""

    @property
    def ids(self) -> Sequence[str]:
        """One id per example. Examples with equal ids share one weight, and so one score."""

    @property
    def digest(self) -> str:
        """Hex digest of the content, the ids and their order: equal in every process, and only for equal data."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Query:
    """A question to the trained model: phi = sum_k coefficients[k] * measurement(examples[k]).

    Args:
        id: any non-empty string, unique among the experiment's queries.
        examples: at least one example, of the kind that `Task.collate` takes.
        coefficients: one finite number per example; empty means 1/n each (the mean). A negative one makes a contrast.
        measurement: the name of one of the task's `measurements`; None is what the task measures by default.

    Raises:
        InputError: any of these does not hold; the error names the query.
    """

    id: str
    examples: Sequence[Any]
    coefficients: Sequence[float] = field(default=())
    measurement: str | None = None

    def __post_init__(self) -> None:
        identity: Any = self.id  # Any, and so below: tasks of all kinds of authors make queries
        if not isinstance(identity, str) or not identity:
            raise InputError(f"expected a query's id to be a non-empty string, found {self.id!r}", field="queries")
        examples = tuple(self.examples)
        if not examples:
            raise self.error("expected at least one example, found none")
        coefficients: tuple[Any, ...] = tuple(self.coefficients) or (1.0 / len(examples),) * len(examples)
        if len(coefficients) != len(examples):
            raise self.error(f"expected {len(examples)} coefficients, one per example, found {len(coefficients)}")
        for value in coefficients:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise self.error(f"expected finite coefficients, found {value!r}")
        if not any(coefficients):
            raise self.error("expected a coefficient other than 0: its measurement would be 0 whatever is trained")
        named: Any = self.measurement
        if named is not None and (not isinstance(named, str) or not named):
            raise self.error(f"expected measurement to be the name of one, found {named!r}")
        object.__setattr__(self, "examples", examples)
        object.__setattr__(self, "coefficients", tuple(float(value) for value in coefficients))

    def error(self, message: str) -> InputError:
        """An InputError that names this query."""
        return InputError(message, field=f"query {self.id!r}")


class Task(Protocol):
    """What every task has. The engine sets the model's mode, dtype, device and seed; a task uses the module given.

    A class may define these too, and gets the default of the same-named function of this module otherwise:

    * `denominator(batch) -> float`: what the batch's summed losses are divided by; additive over the batch's rows;
    * `measurement(model, batch) -> Tensor [rows]`: what a query measures of each of its examples;
    * `measurements: Mapping[str, (model, batch) -> Tensor [rows]]`: others by name, which a query or the `queries:` section chooses;
    * `query_measurement(model, query) -> Tensor []`: phi itself, where it is not a sum over examples;
    * `units(batch) -> Tensor [rows, tokens]`: for packed rows, which document each loss belongs to: an index into the
      training data's `documents` (their ids; equal ids share one score), -1 where there is none;
    * `token_ids(batch) -> Tensor [rows, tokens]`: for scores of tokens, the token at each column of the losses, -1 on padding;
    * `token_labels(batch) -> Tensor [rows, tokens]`: the target at each column, -100 where there is none;
    * `token_text(ids) -> list[str]`: how a person sees each token;
    * `render_document(id) -> str | PIL.Image.Image`: how a person sees a document of packed rows;
    * `render(example) -> str | PIL.Image.Image`: how a person sees an example in reports;
    * `version`: text to change when the class comes to compute something else, so that state of before is not resumed.
    """

    def build_model(self) -> nn.Module:
        """A fresh model; deterministic under `torch.manual_seed`, which the engine calls first."""

    def training_data(self) -> Dataset:
        """The training examples; the same in every process."""

    def queries(self) -> Sequence[Query]:
        """The queries, with unique ids."""

    def collate(self, examples: Sequence[Any], /) -> Batch:
        """A batch of these examples, in their order; deterministic."""

    def example_losses(self, model: nn.Module, batch: Batch, /) -> Tensor:
        """Unreduced, unweighted losses: [rows], or [rows, tokens] for token scores, in the model's dtype.

        In the second form column s is the loss of the *target* at s, so column 0 is 0. A row's loss depends on other
        rows only through the model's buffers and batch statistics.
        """


REQUIRED_METHODS = ("build_model", "training_data", "queries", "collate", "example_losses")


def rows(batch: Batch) -> int:
    """The number of rows: the leading dimension that all tensors of the batch share.

    Raises:
        InputError: no tensor has a dimension, or leading dimensions differ, so the task has to define `denominator`.
    """
    leading = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    if len(leading) != 1:
        found = f"leading dimensions {sorted(leading)}" if leading else "no tensor"
        raise InputError(
            f"cannot tell the number of rows of a batch with {found}: define denominator(batch)", field="task"
        )
    return int(leading.pop())


def denominator(task: Task, batch: Batch) -> float:
    """What the batch's loss is divided by: `task.denominator(batch)`, by default its number of rows.

    Raises:
        InputError: it is not a finite number above 0.
    """
    method = getattr(task, "denominator", None)
    value = float(rows(batch) if method is None else method(batch))
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"denominator(batch) gave {value}, expected a finite number above 0", field="task")
    return value


def find_measurement(task: Task, query: Query) -> Callable[[nn.Module, Batch], Tensor] | None:
    """The query's own measurement among the task's `measurements`; None where it names none.

    Raises:
        InputError: the task has none of that name.
    """
    if query.measurement is None:
        return None
    known: Any = getattr(task, "measurements", {})
    if query.measurement not in known:
        has = f"this task has {', '.join(known)}" if known else "this task has none by name"
        raise query.error(f"no measurement {query.measurement!r}; {has}")
    found: Callable[[nn.Module, Batch], Tensor] = known[query.measurement]
    return found


def measurement(task: Task, model: nn.Module, batch: Batch, query: Query | None = None) -> Tensor:
    """One value per example [rows]: the query's own measurement, else the task's, else the loss (summed over tokens)."""
    method = None if query is None else find_measurement(task, query)
    method = method or getattr(task, "measurement", None)
    values: Tensor = task.example_losses(model, batch) if method is None else method(model, batch)
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def query_measurement(
    task: Task, model: nn.Module, query: Query, place: Callable[[Batch], Batch] | None = None
) -> Tensor:
    """phi [] of a query: `task.query_measurement`, by default sum_k coefficients[k] * measurement_k.

    The query's examples are a batch of their own, so no padding to the training batches' width. `place` moves the batch
    to the model's device and dtype; by default `place_like` does.
    """
    method = getattr(task, "query_measurement", None)
    if method is not None:
        value: Tensor = method(model, query)
        return value
    batch = task.collate(query.examples)
    values = measurement(task, model, place_like(model, batch) if place is None else place(batch), query)
    return (values * values.new_tensor(query.coefficients)).sum()


def parts(task: Task, query: Query, size: int | None) -> list[Query]:
    """Queries of at most `size` examples whose phis add up to the query's; the query itself where the task measures it as a whole."""
    count = len(query.examples)
    if size is None or size >= count or getattr(task, "query_measurement", None) is not None:
        return [query]
    cuts = [slice(at, at + size) for at in range(0, count, size)]
    return [replace(query, examples=query.examples[cut], coefficients=query.coefficients[cut]) for cut in cuts]


def units(task: Task, batch: Batch) -> Tensor | None:
    """Document indices [rows, tokens] of packed rows: `task.units(batch)`; None where each row is one example."""
    method = getattr(task, "units", None)
    found: Tensor | None = None if method is None else method(batch)
    return found


def token_ids(task: Task, batch: Batch) -> Tensor:
    """The tokens [rows, tokens] at the columns of the losses, -1 on padding: `task.token_ids(batch)`.

    Raises:
        InputError: the task does not say it, or not as int64 [rows, tokens].
    """
    method = getattr(task, "token_ids", None)
    found: Any = None if method is None else method(batch)
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise InputError("scores of tokens need token_ids(batch) -> Tensor [rows, tokens]", field="task")
    return found.cpu()


def token_labels(task: Task, batch: Batch) -> Tensor:
    """The targets [rows, tokens], -100 where there is none: `task.token_labels(batch)`, by default the tokens themselves."""
    method = getattr(task, "token_labels", None)
    if method is not None:
        found: Tensor = method(batch)
        return found.cpu()
    tokens = token_ids(task, batch)
    return tokens.masked_fill(tokens < 0, -100)


def render(task: Task, example: Any) -> str | Image:
    """How a person sees the example: `task.render(example)`, by default the first 200 characters of its repr."""
    method = getattr(task, "render", None)
    shown: str | Image = repr(example)[:200] if method is None else method(example)
    return shown


def render_document(task: Task, document: str) -> str | Image | None:
    """How a person sees a document of packed rows: `task.render_document(id)`; None where the task does not say."""
    method = getattr(task, "render_document", None)
    shown: str | Image | None = None if method is None else method(document)
    return shown


def place_like(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the device of the model's first parameter, float tensors in its dtype; all else in it as it is."""
    like = next(model.parameters())

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(like.device, like.dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map(move, batch)
