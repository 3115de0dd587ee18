"""The optimizer that an experiment file asks for, over the parameters of its model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from magic_pipeline.attribution.optimizer_settings import MuonSettings, OptimizerSettings
from magic_pipeline.errors import InputError
from magic_pipeline.metagradient.model import FunctionalModel
from magic_pipeline.metagradient.muon import Muon
from magic_pipeline.metagradient.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from magic_pipeline.metagradient.parameter_groups import Group, Grouped

logger = logging.getLogger("magic_pipeline.attribution")


def optimizer_of(settings: OptimizerSettings, model: FunctionalModel, ranks: int = 1) -> Optimizer:
    """The optimizer of an experiment for the trainable parameters of its model.

    Raises:
        InputError: a pattern matches none of them, or Muon has more than one rank.
    """
    make = _muon(settings, model, ranks) if isinstance(settings, MuonSettings) else _elementwise(settings)
    if not settings.groups:
        return make()
    names, groups = list(model.params), list[Group]()
    for number, group in enumerate(settings.groups):
        matched = [name for name in names if re.search(group.match, name)]
        field = f"training.optimizer.groups[{number}].match"
        if not matched:
            message = f"{group.match!r} is found in no trainable parameter's name; the first is {names[0]!r}"
            raise InputError(message, field=field)
        if all(any(re.search(earlier.pattern, name) for earlier in groups) for name in matched):
            message = (
                f"{group.match!r} is found in no parameter left by the earlier groups; the first that matches counts"
            )
            raise InputError(message, field=field)
        factor = group.lr_factor if group.lr is None else group.lr / settings.lr
        groups.append(Group(group.match, make(**group.changed()), factor))
    return Grouped(tuple(groups), make())


def _elementwise(settings: OptimizerSettings) -> Callable[..., Optimizer]:
    kinds: Mapping[str, Callable[..., Optimizer]] = {
        "sgd": SGD, "adam": Adam, "adamw": AdamW, "adagrad": Adagrad, "rmsprop": RMSprop,
    }  # fmt: skip
    content = settings.model_dump(exclude={"groups", "lr"})
    return partial(kinds[content.pop("name")], **content)


def _muon(settings: MuonSettings, model: FunctionalModel, ranks: int) -> Callable[..., Optimizer]:
    if ranks > 1:
        raise InputError(
            "muon orthogonalises whole matrices, and ranks hold pieces of them; take ranks: 1, or adamw", field="ranks"
        )
    chosen = frozenset(muon_matrices(model, settings.match))
    others = [name for name in model.params if name not in chosen]
    logger.info("muon: Newton-Schulz for %d matrices, AdamW for %d others", len(chosen), len(others))
    logger.debug("muon: AdamW for %s", ", ".join(others) or "none")
    content = settings.model_dump(exclude={"groups", "lr", "name", "match", "adamw"})
    of_adamw = settings.adamw.model_dump(exclude={"lr"})
    factor = 1.0 if settings.adamw.lr is None else settings.adamw.lr / settings.lr

    def make(**changed: object) -> Muon:
        mine = {name: value for name, value in changed.items() if name in content}
        theirs = {name: value for name, value in changed.items() if name in of_adamw}
        return Muon(chosen, **content | mine, adamw=AdamW(**of_adamw | theirs), adamw_lr_factor=factor)

    return make


def muon_matrices(model: FunctionalModel, match: str | None) -> list[str]:
    """The names of the parameters that Muon moves: matrices whose name has a match of the pattern.

    Without a pattern, all trainable matrices but those of embeddings (and what is tied to them) and of the last layer, as Muon is
    meant for hidden layers.

    Raises:
        InputError: there is none.
    """
    matrices = [name for name, p in model.params.items() if p.dim() == 2]
    if match is None:
        outer, last = set[int](), None
        for module in model.module.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                if isinstance(module, nn.Embedding):
                    outer.add(id(weight))
                else:
                    last = weight
        outer.add(id(last))
        by_name = dict(model.module.named_parameters())
        found = [name for name in matrices if id(by_name[name]) not in outer]
        if not found:
            raise InputError(
                "muon is for hidden layers, and this model has no trainable matrix but those of embeddings and of its last layer; "
                "say which ones with training.optimizer.match, or take adamw",
                field="training.optimizer.name",
            )
        return found
    found = [name for name in matrices if re.search(match, name)]
    if not found:
        raise InputError(
            f"{match!r} is found in the name of no trainable matrix; there are {', '.join(matrices[:3]) or 'none'}",
            field="training.optimizer.match",
        )
    return found
