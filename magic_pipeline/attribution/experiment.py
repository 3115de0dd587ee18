"""The experiment file: one YAML file is one experiment. No torch.

Whatever is wrong with a file becomes one InputError that names the file, the line where it is known, and the field.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from magic_pipeline.attribution.experiment_settings import (
    AttributionSettings,
    AutoOrCount,
    File,
    InverseSqrtSchedule,
    PolynomialSchedule,
    QueriesSettings,
    Ranks,
    RestartSchedule,
    TableSchedule,
    TaskSettings,
    TrainingSettings,
    ValidationSettings,
    WarmupSchedule,
)
from magic_pipeline.attribution.located_yaml import LocatedYaml, read_yaml
from magic_pipeline.attribution.optimizer_settings import (
    AdagradSettings,
    AdamSettings,
    AdamWSettings,
    MuonSettings,
    RMSpropSettings,
    SGDSettings,
)
from magic_pipeline.attribution.section import Section
from magic_pipeline.errors import InputError

_NAME = r"^[a-z][a-z0-9_]{0,39}$"
# The models that a value of `name` chooses between, under training.optimizer and training.schedule.
_VARIANTS: Mapping[str, Mapping[str, type[Section]]] = {
    "optimizer": {
        "sgd": SGDSettings,
        "adam": AdamSettings,
        "adamw": AdamWSettings,
        "adagrad": AdagradSettings,
        "rmsprop": RMSpropSettings,
        "muon": MuonSettings,
    },
    "schedule": {
        "constant": WarmupSchedule,
        "linear": WarmupSchedule,
        "cosine": WarmupSchedule,
        "cosine_with_restarts": RestartSchedule,
        "polynomial": PolynomialSchedule,
        "inverse_sqrt": InverseSqrtSchedule,
        "table": TableSchedule,
    },
}


class Experiment(Section):
    """One experiment, as its file says it. Immutable; equal files in one folder give equal experiments."""

    name: str = Field(
        pattern=_NAME, description="the experiment's name, unique: a small letter, then up to 39 of a-z, 0-9 and _"
    )
    storage: str = Field(
        default=".magic/store",
        min_length=1,
        description="where everything is kept: a folder (relative to this file) or a URL such as s3://bucket/prefix",
    )
    storage_name: str | None = Field(
        default=None,
        pattern=_NAME,
        description="the folder's name in the storage, if not the experiment's (after renaming)",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        exclude=True,
        description="for S3: endpoint_url, profile, region; else what the storage's fsspec file system takes; never shown",
    )
    task: TaskSettings = Field(
        description="what is attributed: {type: a name or package.module:ClassName, ...settings}"
    )
    init: File | None = Field(
        default=None, description="a file of initial weights (.pt, .safetensors or .npz); null lets the task build them"
    )
    training: TrainingSettings = Field(default=TrainingSettings(), description="the training run")
    attribution: AttributionSettings = Field(default=AttributionSettings(), description="the walk back through it")
    ranks: Ranks = Field(
        default=1,
        description="logical ranks: the parts that every batch, the optimizer's slots and the walk are divided into",
    )
    processes: AutoOrCount = Field(
        default="auto",
        description="processes that the ranks run in, a divisor of ranks; auto takes one a GPU, else as many as there are CPUs",
    )
    queries: QueriesSettings = Field(
        default=QueriesSettings(), description="where the queries come from: {file}, or {split, count}"
    )
    validation: ValidationSettings = Field(default=ValidationSettings(), description="checks against retraining")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where tensors live; auto takes the GPU if there is one"
    )

    _path: Path | None = PrivateAttr(default=None)
    _text: str = PrivateAttr(default="")
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("storage")
    @classmethod
    def _no_credentials(cls, storage: str) -> str:
        if re.search(r"://[^/@]*:[^/@]*@", storage):
            raise ValueError("holds a password; put it into the environment or into storage_options")
        return storage

    @field_validator("init")
    @classmethod
    def _weights_format(cls, init: str | None) -> str | None:
        if init is not None and not init.endswith((".pt", ".safetensors", ".npz")):
            raise ValueError("should be a .pt, .safetensors or .npz file")
        return init

    @field_validator("processes")
    @classmethod
    def _divide_ranks(cls, processes: str | int, info: ValidationInfo) -> str | int:
        ranks = info.data.get("ranks", 1)
        if isinstance(processes, int) and ranks % processes:
            raise ValueError(f"should be auto or a divisor of ranks ({ranks})")
        return processes

    @property
    def path(self) -> Path | None:
        """The file it was read from, as it was given; None if it was made in Python."""
        return self._path

    @property
    def text(self) -> str:
        """What the file said when it was read, comments too, without `storage_options`; empty if it was made in Python."""
        return self._text

    @property
    def folder(self) -> Path:
        """The absolute folder that relative paths in it start from."""
        return self._folder

    @property
    def storage_url(self) -> str:
        """The storage as a URL, or as an absolute path."""
        return self.storage if "://" in self.storage else str(self.resolve(self.storage))

    @property
    def storage_folder(self) -> str:
        """The folder of this experiment in the storage."""
        return self.storage_name or self.name

    def require_validation(self) -> None:
        """Raises InputError where the file asks for no validation."""
        if all(part is None for _, part in self.validation):
            raise InputError(
                "nothing is asked for; add for example  validation: {lds: {subsets: 50, drop_fraction: 0.05}}",
                file=self.path,
                field="validation",
            )

    def resolve(self, file: str) -> Path:
        """The absolute path of a file that the experiment names: `~` expanded, relative to the experiment's folder."""
        return Path(os.path.normpath(self._folder / os.path.expanduser(file)))


def recipe_content(experiment: Experiment, *, split_matters: bool) -> dict[str, Any]:
    """What an experiment file says that changes the trained model, as plain data: its part of the training fingerprint.

    Files stand in it by their presence only, since paths change no number: whoever opens them adds the digests of the
    initial weights, the batch order and the learning rates. The name, storage, queries, validation, device, processes and
    everything under `attribution` are left out.

    Args:
        split_matters: whether the model has dropout or batch statistics, so that the split into micro-batches
            changes numbers.
    """
    training = experiment.training.model_dump(mode="json", exclude={"microbatch_size", "order"})
    training["schedule"].pop("values", None)
    for name, without in (("groups", []), ("dampening", 0.0)):
        # What changes nothing is not told, as before there was such a field.
        if training["optimizer"].get(name) == without:
            training["optimizer"].pop(name)
    for group in training["optimizer"].get("groups", ()):
        for name in ("lr", "momentum", "betas"):
            if group[name] is None:
                group.pop(name)
    if split_matters:
        training["microbatch_size"] = experiment.training.microbatch_size
    return {
        "task": {"type": experiment.task.type, "settings": experiment.task.settings},
        "own_initial_weights": experiment.init is not None,
        "training": training | {"own_order": experiment.training.order is not None},
        "ranks": experiment.ranks,
    }


def parse_experiment(content: Mapping[str, Any], *, folder: Path | str | None = None) -> Experiment:
    """An experiment from plain data, as in the file; relative paths start from `folder` (default: the current one).

    Raises:
        InputError: a field is unknown, missing or wrong, or a file that it names is not there.
    """
    return _validated(LocatedYaml(content, None), None, Path(folder or Path.cwd()).absolute())


def load_experiment(path: Path | str) -> Experiment:
    """The experiment in one YAML file.

    Raises:
        InputError: as `parse_experiment`, or the file is missing, empty, not YAML or not a mapping.
    """
    path = Path(path)
    located = read_yaml(path)
    if located.content is None:
        raise InputError("the file is empty; an experiment needs at least name and task", file=path)
    if not isinstance(located.content, dict):
        kind = type(located.content).__name__
        raise InputError(f"should be a mapping of fields (name: ..., task: ...), found a {kind}", file=path)
    return _validated(located, path, path.absolute().parent)


def load_experiments(folder: Path | str) -> dict[Path, Experiment | InputError]:
    """Every `*.yaml` and `*.yml` file of a folder, in the order of paths; a wrong file costs only its own experiment.

    Files of one experiment name are all wrong, since their assets would be the same. A folder that is not there has
    no experiments.

    Raises:
        InputError: `folder` is a file.
    """
    folder = Path(folder)
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise InputError("should be a folder of experiment files, found a file", file=folder)
    experiments: dict[Path, Experiment | InputError] = {}
    owners: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".yaml", ".yml") or path.name.startswith(".") or path.is_dir():
            continue
        try:
            experiment = load_experiment(path)
        except InputError as error:
            experiments[path] = error
        else:
            experiments[path] = experiment
            owners.setdefault(experiment.name, []).append(path)
    for name, paths in owners.items():
        for path in paths if len(paths) > 1 else ():
            others = ", ".join(str(other) for other in paths if other != path)
            experiments[path] = InputError(f"the name {name} is also used in {others}", file=path, field="name")
    return experiments


def _validated(located: LocatedYaml, path: Path | None, folder: Path) -> Experiment:
    try:
        experiment = Experiment.model_validate(located.content)
    except ValidationError as error:
        raise _first_of(error.errors(include_url=False), located, path) from None
    experiment._path, experiment._folder = path, folder
    experiment._text = located.text_without("storage_options").removeprefix("\ufeff")
    _check_files(experiment, located)
    return experiment


def _first_of(problems: Sequence[ErrorDetails], located: LocatedYaml, path: Path | None) -> InputError:
    """The problem to show: an unknown field first, since it is often why another one is missing; then by line."""

    def order(problem: ErrorDetails) -> tuple[bool, float]:
        line = located.line(_locate(problem["loc"])[0])
        return problem["type"] != "extra_forbidden", math.inf if line is None else line

    fields, message = _explain(min(problems, key=order))
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    return _input_error(message, located, path, fields)


def _check_files(experiment: Experiment, located: LocatedYaml) -> None:
    schedule = experiment.training.schedule
    named: dict[tuple[str, ...], str | None] = {
        ("init",): experiment.init,
        ("training", "order"): experiment.training.order,
        ("training", "schedule", "values"): schedule.values if isinstance(schedule, TableSchedule) else None,
        ("queries", "file"): experiment.queries.file,
    }
    if experiment.queries.file is not None and "://" in experiment.queries.file:
        named.pop(("queries", "file"))  # looked for when the experiment is opened: loading many asks no network
    for fields, file in named.items():
        if file is not None and not experiment.resolve(file).is_file():
            raise _input_error(f"there is no file {experiment.resolve(file)}", located, experiment.path, fields)


def _input_error(message: str, located: LocatedYaml, path: Path | None, fields: Sequence[str | int]) -> InputError:
    dotted = ".".join(str(part) for part in fields)
    return InputError(message, file=path, line=located.line(fields), field=dotted or None)


def _explain(problem: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    """The field at fault as its user knows it, and what is wrong with it."""
    fields, section = _locate(problem["loc"])
    kind, context, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "extra_forbidden":
        return fields, "unknown field; " + _suggestion(fields, section)
    if kind == "missing":
        return fields, f"missing; {section.model_fields[str(fields[-1])].description}"
    if kind == "union_tag_not_found":
        return (*fields, "name"), "missing; one of " + ", ".join(_VARIANTS[str(fields[-1])])
    if kind == "union_tag_invalid":
        known = ", ".join(_VARIANTS[str(fields[-1])])
        return (*fields, "name"), f"should be one of {known}, found {context['tag']!r}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        message = "should be a mapping of fields"
    elif kind == "string_pattern_mismatch":
        message = f"does not have the form of {section.model_fields[str(fields[-1])].description}"
    else:
        message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    secret = fields and str(fields[0]).startswith("storage")
    if isinstance(value, str | int | float | bool | None) and not secret:
        message += f", found {_shown(value)}"
    return fields, message


def _locate(location: Sequence[str | int]) -> tuple[tuple[str | int, ...], type[BaseModel]]:
    """pydantic's location without the names of chosen variants, and the section that its last field belongs to."""
    fields: list[str | int] = []
    section: type[BaseModel] = Experiment
    inner: tuple[type[BaseModel], ...] = (Experiment,)
    for part in location:
        if len(inner) > 1:
            inner = (_VARIANTS[str(fields[-1])][str(part)],)
            continue
        section = inner[0] if inner else section
        fields.append(part)
        inner = _sections_of(section, str(part))
    return tuple(fields), section


def _sections_of(section: type[BaseModel], field: str) -> tuple[type[BaseModel], ...]:
    """The sections that a field chooses from: none for plain values, one without a choice."""
    annotation = section.model_fields[field].annotation if field in section.model_fields else None
    choices = (annotation, *get_args(annotation))
    return tuple(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section))


def _suggestion(unknown: Sequence[str | int], section: type[BaseModel]) -> str:
    field, dotted = str(unknown[-1]), ".".join(str(part) for part in unknown)
    elsewhere = {known for known in _dotted_fields(Experiment) if known.endswith("." + field)} - {dotted}
    if len(unknown) > 1 and str(unknown[-2]) in _VARIANTS:
        # What other variants have is no suggestion for this one.
        elsewhere = {known for known in elsewhere if not known.startswith(dotted.removesuffix(field))}
    if elsewhere:
        return f"did you mean {min(elsewhere, key=lambda known: (len(known.split('.')), known))}?"
    close = difflib.get_close_matches(field, section.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else "known here: " + ", ".join(section.model_fields)


def _dotted_fields(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for field in section.model_fields:
        yield prefix + field
        for inner in _sections_of(section, field):
            yield from _dotted_fields(inner, f"{prefix}{field}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
