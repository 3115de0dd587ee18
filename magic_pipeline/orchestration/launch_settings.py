"""What the launchpad offers: how a run does its work, never what it computes. Each field overrides the experiment file for one run."""

# No postponed annotations here: Dagster reads the fields' types.

import dagster as dg
from pydantic import Field, ValidationError

from magic_pipeline.attribution.experiment import Experiment
from magic_pipeline.errors import InputError

_NOT_OF_THE_FILE = {"make_freed_states"}


class LaunchSettings(dg.Config):
    """Of every run that computes. What is left empty is as the experiment file says."""

    device: str | None = Field(
        default=None, description="Where tensors live: auto, cpu or cuda; auto takes the GPU if there is one."
    )
    memory_budget: str | None = Field(
        default=None, description="Memory for the work: a size such as 8GiB; auto measures what is free."
    )

    def applied_to(self, experiment: Experiment) -> Experiment:
        """The experiment with these settings in place of its own.

        Raises:
            InputError: a value is not one that the experiment file takes.
        """
        given = {name: value for name, value in self.model_dump(exclude=_NOT_OF_THE_FILE).items() if value is not None}
        if not given:
            return experiment
        content = {"device": experiment.device} | {k: given.pop(k) for k in ("device",) if k in given}
        attribution = experiment.attribution.model_dump() | given
        try:
            checked = Experiment.model_validate(
                {"name": experiment.name, "task": {"type": experiment.task.type}, **content, "attribution": attribution}
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            wrong = str(problem["loc"][-1])
            message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
            raise InputError(f"{message}, found {problem['input']!r}", field=f"launch settings: {wrong}") from None
        return experiment.model_copy(update={"device": checked.device, "attribution": checked.attribution})


class TrainingSettings(LaunchSettings):
    """Of a run that trains."""

    make_freed_states: bool = Field(
        default=True,
        description="Whether states of a finished training that gc has freed are made again; a walk that needs them does so by itself.",
    )


class WalkSettings(LaunchSettings):
    """Of a run that walks queries. A walk that was begun before keeps the plan that it was begun with."""

    query_batch: int | None = Field(default=None, description="Queries that are walked together, at least 1.")
