"""The pullback of a shard, compiled: the engine beside the eager one of pullback.py.

What is compiled is the eager engine itself. Its whole pullback of one lane, double backward included, is recorded once as a graph of
ATen operations, so that tied weights, buffers, padding twins and weights of tokens are there by construction. Then it is cut in two:

* `shared`, what does not depend on the cotangents, whose results are kept. The gradient itself is not among them, so that its weight
  matmuls fall away: 2/3 of a training step's FLOPs where the eager graph takes all of them;
* `lane`, the rest, run once a lane: 2 training steps' FLOPs, its elementwise operations fused.

A recording holds for one *form* of shard: shapes, dtypes and whatever in the batch is no tensor. No state is made here: states come
from `train_step`, so that the engine changes no state's bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.pullback import PulledGraph, ShardGraph, graph_of, pull_lanes, shard_graph
from magic_pipeline.metagradient.state import Tensors
from magic_pipeline.metagradient.step import Shard, StepRecord

# Largest difference from the eager engine, relative to each tensor's largest element, that still counts as rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


# Makes one half faster; None stands for torch.compile.
Compiler = Callable[[torch.fx.GraphModule], Callable[..., Any]]


class CannotCompileError(Exception):
    """The compiled engine cannot be had for this model or on this machine; says why."""


@dataclass
class CompiledEngine:
    """Pulls shards of the `forms` back in compiled code, all others eagerly.

    Attributes:
        forms: which forms are compiled (`form_of`). Fixed in the walk plan, so that a resumed walk compiles the same ones.
        compiler: of the halves; default torch.compile.
        unavailable: called with the reason when a form cannot be compiled after all; the shard is then pulled back eagerly.
    """

    forms: frozenset[str]
    unavailable: Callable[[CannotCompileError], None]
    compiler: Compiler | None = None
    _failed: set[str] = field(default_factory=set)

    def shard_graph(
        self, model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float
    ) -> PulledGraph:
        """As pullback.shard_graph."""
        form = form_of(shard)
        if form not in self.forms or form in self._failed:
            return shard_graph(model, record, shard, index, denominator)
        if form not in model.compiled:
            try:
                model.compiled[form] = compile_shard(model, record, shard, index, denominator, self.compiler)
            except CannotCompileError as error:
                self._failed.add(form)
                self.unavailable(error)
                return shard_graph(model, record, shard, index, denominator)
        compiled: CompiledShard = model.compiled[form]
        return compiled.graph(record, shard, index, denominator)


@dataclass(frozen=True)
class CompiledShard:
    """The two halves, for all shards of one form.

    Attributes:
        outputs: names of what has cotangents, in the order of `lane`'s last arguments.
        reached: for parameters, buffers and weights in turn, whether anything is pulled back to them.
    """

    outputs: tuple[str, ...]
    reached: tuple[bool, ...]
    shared: Callable[..., Sequence[Any]]
    lane: Callable[..., Sequence[Tensor]]

    def graph(self, record: StepRecord, shard: Shard, index: int, denominator: float) -> CompiledGraph:
        """Runs the shared half at a step's own state."""
        with torch.no_grad():
            kept = self.shared(*_primals(record, shard, index, denominator))
        return CompiledGraph(self, tuple(kept))


@dataclass(frozen=True)
class CompiledGraph:
    """What `ShardGraph` is to the eager engine: one shard at one state, ready to be pulled through."""

    compiled: CompiledShard
    kept: tuple[Any, ...]

    def zero_cotangents(self, record: StepRecord) -> Tensors:
        """One lane of zeros, to measure with."""
        shapes = {f"grad/{name}": tensor for name, tensor in record.state.params.items()}
        shapes |= {f"buffer/{name}": tensor for name, tensor in record.state.buffers.items()}
        return {name: torch.zeros_like(shapes[name]).unsqueeze(0) for name in self.compiled.outputs}

    def pull(self, cotangents: Tensors, *, keep_graph: bool) -> list[Tensor | None]:
        """As ShardGraph.pull; lanes go one after the other through the same code."""
        lanes = len(next(iter(cotangents.values())))
        with torch.no_grad():
            pulled = [
                self.compiled.lane(*self.kept, *(cotangents[name][lane].contiguous() for name in self.compiled.outputs))
                for lane in range(lanes)
            ]
        together = iter(
            [torch.stack(parts) if lanes > 1 else parts[0].unsqueeze(0) for parts in zip(*pulled, strict=True)]
        )
        return [next(together) if reached else None for reached in self.compiled.reached]


def form_of(shard: Shard) -> str:
    """A digest of everything of a shard that compiled code depends on, besides values."""
    tree, structure = _flat(shard.batch)
    parts: list[Any] = [structure, tuple(shard.score_places.shape)]
    parts += [(tuple(t.shape), str(t.dtype), str(t.device)) if isinstance(t, Tensor) else repr(t) for t in tree]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def compile_shard(
    model: FunctionalModel,
    record: StepRecord,
    shard: Shard,
    index: int,
    denominator: float,
    compiler: Compiler | None = None,
) -> CompiledShard:
    """Records, cuts and compiles the pullback of this shard's form, and compares it with the eager one on this shard.

    Args:
        compiler: makes a half faster; default torch.compile.

    Raises:
        CannotCompileError: the model draws at random or depends on values in a way that cannot be recorded, the compiler is missing or
            fails, or the results differ by more than rounding.
    """
    if model.draws_randomly:
        raise CannotCompileError("the model draws at random (dropout)")
    try:
        recording = _record(model, record, shard, index, denominator)
        shared, lane = _cut(recording)
        make = compiler or _torch_compile
        compiled = CompiledShard(recording.outputs, recording.reached, make(shared), make(lane))
        _compare(compiled, model, record, shard, index, denominator)
    except (CannotCompileError, InputError):
        raise
    except Exception as error:  # whatever a compiler raises: there is always the eager engine
        raise CannotCompileError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return compiled


def _torch_compile(half: torch.fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(half, dynamic=False, fullgraph=True)


@dataclass(frozen=True)
class _Recording:
    """One lane's pullback as a graph of ATen operations of (primals, cotangents).

    Attributes:
        graph: functional: nothing is changed in place.
        primals: how many of its arguments do not depend on the query.
    """

    graph: torch.fx.GraphModule
    arguments: list[Tensor]
    primals: int
    outputs: tuple[str, ...]
    reached: tuple[bool, ...]


def _record(model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float) -> _Recording:
    from torch.fx.experimental.proxy_tensor import make_fx

    primals = _primals(record, shard, index, denominator)
    sample = shard_graph(model, record, shard, index, denominator)
    outputs = tuple(sample.outputs)
    cotangents = [torch.zeros_like(sample.outputs[name]) for name in outputs]
    reached: list[bool] = []

    def pulled(*arguments: Tensor) -> list[Tensor]:
        graph = _traced_graph(model, record, shard, index, arguments[: len(primals)])
        lane = dict(zip(outputs, (c.unsqueeze(0) for c in arguments[len(primals) :]), strict=True))
        parts = graph.merged(pull_lanes({n: graph.outputs[n] for n in outputs}, graph.inputs, lane, keep_graph=False))
        reached[:] = [part is not None for part in parts]
        return [part.squeeze(0) for part in parts if part is not None]

    arguments = [*primals, *cotangents]
    traced = make_fx(pulled, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    # A second pass, since mutations can only be taken out once there is nothing left to differentiate.
    graph = make_fx(torch.func.functionalize(traced), tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    graph.graph.eliminate_dead_code()
    return _Recording(graph, arguments, len(primals), outputs, tuple(reached))


def _traced_graph(
    model: FunctionalModel, record: StepRecord, shard: Shard, index: int, primals: Sequence[Tensor]
) -> ShardGraph:
    """The eager engine's graph, of arguments in the order of `_primals`."""
    left = iter(primals)
    params = {name: next(left) for name in record.state.params}
    buffers = {name: next(left) for name in record.shard_buffers[index]}
    counters = {name: next(left) for name in record.shard_counters[index]}
    denominator = next(left)
    tree, _ = _flat(shard.batch)
    batch = _unflat(shard.batch, [next(left) if isinstance(leaf, Tensor) else leaf for leaf in tree])
    return graph_of(model, params, buffers, counters, batch, shard, denominator)


def _primals(record: StepRecord, shard: Shard, index: int, denominator: float) -> list[Tensor]:
    tensors = [leaf for leaf in _flat(shard.batch)[0] if isinstance(leaf, Tensor)]
    state = [
        *record.state.params.values(),
        *record.shard_buffers[index].values(),
        *record.shard_counters[index].values(),
    ]
    return [*state, torch.tensor(denominator, dtype=torch.float64), *tensors]


def _flat(batch: Any) -> tuple[list[Any], str]:
    from torch.utils import _pytree as pytree

    leaves_, structure = pytree.tree_flatten(batch)
    return leaves_, str(structure)


def _unflat(batch: Any, leaves_: Sequence[Any]) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_unflatten(list(leaves_), pytree.tree_structure(batch))


def _cut(recording: _Recording) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(shared, lane): `shared(*primals)` gives what `lane(*shared's results, *cotangents)` needs."""
    nodes = list(recording.graph.graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    (result,) = (node for node in nodes if node.op == "output")
    by_query = set(arguments[recording.primals :])
    for node in nodes:
        if by_query.intersection(node.all_input_nodes):
            by_query.add(node)
    by_query.discard(result)
    again = _made_again(nodes, by_query, result)
    crossing = [
        n
        for n in nodes
        if n not in by_query and n not in again and any(u in by_query or u in again or u is result for u in n.users)
    ]
    crossing = [n for n in crossing if n.op != "get_attr"]
    shared, lane = torch.fx.Graph(), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        if node not in by_query and node is not result:
            copies[node] = shared.node_copy(node, copies.__getitem__)
    shared.output(tuple(copies[node] for node in crossing))
    copies = {node: lane.placeholder(f"kept_{i}") for i, node in enumerate(crossing)}
    copies |= {node: lane.placeholder(f"cotangent_{i}") for i, node in enumerate(arguments[recording.primals :])}
    for node in nodes:
        if node in again or (node in by_query and node.op != "placeholder"):
            copies[node] = lane.node_copy(node, copies.__getitem__)
    lane.output(torch.fx.node.map_arg(result.args[0], copies.__getitem__))
    halves = (torch.fx.GraphModule(recording.graph, shared), torch.fx.GraphModule(recording.graph, lane))
    for half in halves:
        half.graph.eliminate_dead_code()
        half.recompile()
    return halves


def _made_again(
    nodes: Sequence[torch.fx.Node], by_query: set[torch.fx.Node], result: torch.fx.Node
) -> set[torch.fx.Node]:
    """What every lane makes again rather than keeps, since it costs nothing: views, constants, elements of tuples."""
    free: set[torch.fx.Node] = set()
    for node in reversed(nodes):
        wanted = any(user in by_query or user in free or user is result for user in node.users)
        if wanted and node not in by_query and (node.op == "get_attr" or _is_view(node)):
            free.add(node)
    return free


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)


def _compare(
    compiled: CompiledShard, model: FunctionalModel, record: StepRecord, shard: Shard, index: int, denominator: float
) -> None:
    """Raises CannotCompileError where the compiled pullback of a random cotangent is not the eager one."""
    eager, mine = (
        shard_graph(model, record, shard, index, denominator),
        compiled.graph(record, shard, index, denominator),
    )
    generator = torch.Generator().manual_seed(0)
    cotangents = {
        name: torch.randn(1, *output.shape, generator=generator, dtype=torch.float64).to(output)
        for name, output in eager.outputs.items()
    }
    expected, found = eager.pull(cotangents, keep_graph=False), mine.pull(cotangents, keep_graph=False)
    for a, b in zip(expected, found, strict=True):
        if (a is None) != (b is None):
            raise CannotCompileError("it reaches other tensors than the eager engine")
    # Relative to the largest of its kind: a tensor whose true cotangent is 0 holds nothing but rounding.
    kinds = [slice(0, len(record.state.params)), slice(len(record.state.params), -1), slice(-1, None)]
    error = max(_difference(expected[kind], found[kind]) for kind in kinds)
    if not error <= TOLERANCE.get(model.dtype, 1e-2):
        raise CannotCompileError(f"its results are {error:.1e} off the eager engine's")


def _difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    scale = max((float(a.abs().max()) for a, _ in pairs), default=0.0)
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0) / scale if scale else 0.0
