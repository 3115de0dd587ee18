"""What lies below an experiment's folder in its storage, told by names alone. No torch, no task: an experiment whose code or data is
lost can be looked at and cleaned up all the same.

Whoever writes objects under new names (layout.py) adds them to `_NAMES` here, or verify calls them foreign and delete leaves them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from magic_pipeline.attribution.experiment import Experiment, parse_experiment, recipe_content
from magic_pipeline.attribution.layout import Layout
from magic_pipeline.attribution.located_yaml import read_yaml
from magic_pipeline.checkpoints.chain import Chain
from magic_pipeline.checkpoints.digests import canonical_json
from magic_pipeline.checkpoints.holder import Holder
from magic_pipeline.checkpoints.sinks import StoredObject
from magic_pipeline.checkpoints.store import Store
from magic_pipeline.errors import DamagedObjectError, InputError, MissingObjectError

Role = Literal["manifest", "blob", "plan", "ledger", "queries", "description", "heartbeat", "epoch"]
Tell = Callable[[str], None]

_BANK = r"validation/[0-9a-f]{32}"
_CHAIN = rf"(trajectory|queries/[A-Za-z0-9_-]+/[0-9a-f]{{32}}|{_BANK}/(?:blocks|later)/\d{{6}}-\d{{4}})"
_FILES = rf"(scores|scores/matrix|{_BANK}/reports)"  # folders of sealed files
# In the order in which they may be deleted: what makes other objects count goes first, what keeps other writers away last.
_NAMES: Mapping[Role, re.Pattern[str]] = {
    "manifest": re.compile(
        rf"{_CHAIN}/(manifests/\d{{8}}\.e\d{{8}}|complete\.e\d{{8}})\.json|{_FILES}/manifests/[A-Za-z0-9_.-]+\.e\d{{8}}\.json"
    ),
    "blob": re.compile(rf"{_CHAIN}/blobs/e\d{{8}}-[0-9a-f]{{32}}\.pt|{_FILES}/blobs/[0-9a-f]{{32}}\.[a-z]+"),
    "plan": re.compile(rf"({_CHAIN}|{_BANK})/plans/\d{{8}}\.json"),
    "ledger": re.compile(r"ledger/\d{20}-[0-9a-f]{8}\.json"),
    "queries": re.compile(r"queries\.json"),
    "description": re.compile(rf"experiment\.json|{_BANK}/bank\.json"),
    "heartbeat": re.compile(r"writers/[0-9a-f]{16}\.json"),
    "epoch": re.compile(rf"{_CHAIN}/epochs/\d{{8}}(\.released)?\.json"),
}
ROLES: tuple[Role, ...] = tuple(_NAMES)
_OF_STORAGE = ("name", "storage", "storage_name", "storage_options")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_IN_CHAIN = re.compile(rf"{_CHAIN}/")
_IN_FILES = re.compile(rf"{_FILES}/(manifests|blobs)/")


def role_of(path: str) -> Role | None:
    """What an object is, by its path below its training's folder; None where nothing of ours writes such a name."""
    return next((role for role, pattern in _NAMES.items() if pattern.fullmatch(path)), None)


@dataclass(frozen=True)
class Walk:
    """One query's walk in the storage, also of a query that is no longer asked."""

    key: str
    digest: str
    chain: Chain


@dataclass(frozen=True)
class InUse:
    """A chain that a process holds; `who` describes it for people."""

    folder: str
    holder: Mapping[str, object]
    who: str

    @classmethod
    def by(cls, holder: Holder, chain: Chain) -> InUse:
        return cls(chain.folder, holder.as_json(), str(holder))


@dataclass(frozen=True)
class Training:
    """One training fingerprint in the storage.

    Attributes:
        objects: those that are ours, as listed.
        foreign: below its folder, but under names that nothing of ours writes.
        current: whether it was made with the experiment file's settings.
    """

    store: Store
    layout: Layout
    objects: tuple[StoredObject, ...]
    foreign: tuple[StoredObject, ...]
    description: Mapping[str, Any] | None
    current: bool

    @property
    def fingerprint(self) -> str:
        return self.layout.fingerprint

    @property
    def bytes(self) -> int:
        return sum(found.size for found in self.objects)

    @property
    def written(self) -> float:
        """When anything was last written, in seconds since 1970 by the storage's clock."""
        return max((found.modified for found in self.objects), default=0.0)

    @cached_property
    def trajectory(self) -> Chain:
        return self._chain(self.layout.trajectory)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """All that have an object, in the order of their keys."""
        names = [
            folder.split("/")[-2:]
            for folder in self._chain_folders
            if folder.startswith(f"{self.layout.root}/queries/")
        ]
        return tuple(Walk(key, digest, self._chain(self.layout.query(key, digest))) for key, digest in names)

    @cached_property
    def banks(self) -> tuple[Chain, ...]:
        """The chains of the validation's retrainings."""
        return tuple(self._chain(f) for f in self._chain_folders if f.startswith(f"{self.layout.root}/validation/"))

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        return (self.trajectory, *(walk.chain for walk in self.walks), *self.banks)

    @cached_property
    def file_folders(self) -> tuple[str, ...]:
        """The folders of sealed files: scores, the matrix, reports."""
        matches = (_IN_FILES.match(self.below(found)) for found in self.objects)
        return tuple(sorted({f"{self.layout.root}/{match[1]}" for match in matches if match}))

    @cached_property
    def _chain_folders(self) -> list[str]:
        return sorted({folder for found in self.objects if (folder := self.chain_folder(found.path)) is not None})

    def _chain(self, folder: str) -> Chain:
        return Chain(self.store, folder, writers=self.layout.writers)

    def below(self, found: StoredObject) -> str:
        """The object's path below the training's folder."""
        return found.path.removeprefix(f"{self.layout.root}/")

    def chain_folder(self, path: str) -> str | None:
        """The folder of the chain that an object (by its whole path) lies in; None for what is in no chain."""
        match = _IN_CHAIN.match(path.removeprefix(f"{self.layout.root}/"))
        return None if match is None else f"{self.layout.root}/{match[1]}"

    def listed_again(self) -> Training:
        """With the objects that are there now."""
        return _sorted_out(self, self.store.tree(self.layout.root))

    def with_role(self, *roles: Role) -> list[StoredObject]:
        """Objects of these kinds, sorted by path."""
        return sorted((o for o in self.objects if role_of(self.below(o)) in roles), key=lambda found: found.path)

    def asked(self) -> list[tuple[str, str, str]] | None:
        """(id, key, digest) of the queries that were asked last; None where nobody knows."""
        try:
            listed = self.store.read_json(self.layout.queries)["queries"]
            return [(query["id"], query["key"], query["digest"]) for query in listed]
        except (MissingObjectError, DamagedObjectError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Inventory:
    """All of an experiment in its storage: its trainings, the current one first, then the latest; and what is not ours."""

    store: Store
    folder: str
    trainings: tuple[Training, ...]
    foreign: tuple[StoredObject, ...]


def take_inventory(store: Store, folder: str, is_current: Callable[[str, Mapping[str, Any]], bool]) -> Inventory:
    """Lists everything below the experiment's folder once.

    Args:
        is_current: asked with a fingerprint and its experiment.json; of several that say yes the latest counts.

    Raises: StorageError.
    """
    by_training: dict[str, list[StoredObject]] = defaultdict(list)
    foreign = []
    for found in store.tree(folder):
        name, _, rest = found.path.removeprefix(f"{folder}/").partition("/")
        if rest and _FINGERPRINT.fullmatch(name):
            by_training[name].append(found)
        else:
            foreign.append(found)
    trainings: list[Training] = []
    for name, objects in by_training.items():
        layout = Layout(folder, name)
        description = _description(store, layout)
        current = description is not None and is_current(name, description)
        trainings.append(_sorted_out(Training(store, layout, (), (), description, current), objects))
    trainings.sort(key=lambda one: (one.current, one.written), reverse=True)
    return Inventory(store, folder, _one_current(trainings), tuple(foreign))


def inventory_of(experiment: Experiment) -> Inventory:
    """The experiment's inventory without opening its task: current is the latest training whose recipe is the file's.

    Raises: InputError for a wrong storage; StorageError.
    """
    store = Store(experiment.storage_url, options=experiment.storage_options or None)
    return take_inventory(store, experiment.storage_folder, lambda _, found: has_recipe(experiment, found))


def storage_of(path: Path, error: InputError) -> Experiment:
    """What an experiment file says of its storage, where the task, its data or its settings are wrong or gone.

    Raises: the error itself, where it is about something else.
    """
    field = (error.field or "").partition(".")[0]
    if field in _OF_STORAGE or field not in Experiment.model_fields:
        raise error
    content = {name: value for name, value in read_yaml(path).content.items() if name in _OF_STORAGE}
    return parse_experiment(content | {"task": {"type": "unknown"}}, folder=path.absolute().parent)


def has_recipe(experiment: Experiment, description: Mapping[str, Any]) -> bool:
    """Whether a training was made from the settings that the file has now. Its data and weights are not looked at."""
    made_from = dict(description.get("made_from", {}))
    if isinstance(made_from.get("task"), Mapping):
        made_from["task"] = {name: value for name, value in made_from["task"].items() if name != "version"}
    recipes = (recipe_content(experiment, split_matters=matters) for matters in (False, True))
    return any(
        all(
            name in made_from and canonical_json(made_from[name]) == canonical_json(value)
            for name, value in recipe.items()
        )
        for recipe in recipes
    )


def _sorted_out(training: Training, listed: Iterable[StoredObject]) -> Training:
    roles = {found: role_of(training.below(found)) for found in listed}
    ours = tuple(found for found, role in roles.items() if role is not None)
    return replace(training, objects=ours, foreign=tuple(found for found, role in roles.items() if role is None))


def _description(store: Store, layout: Layout) -> Mapping[str, Any] | None:
    try:
        return store.read_json(layout.description)
    except (MissingObjectError, DamagedObjectError):
        return None


def _one_current(trainings: list[Training]) -> tuple[Training, ...]:
    """Only the first stays current: the data or the weights of the others were other ones."""
    return tuple(replace(one, current=one.current and number == 0) for number, one in enumerate(trainings))


def size_text(size: int) -> str:
    """Bytes as people read them.

    >>> size_text(512), size_text(1536), size_text(3 * 2**30)
    ('512 bytes', '1.5 KiB', '3.0 GiB')
    """
    if size < 2**10:
        return f"{size} bytes"
    power = min(4, (size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB"


def date_text(seconds: float) -> str:
    """Seconds since 1970 as a date and a time of UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
