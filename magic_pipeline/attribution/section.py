"""What every section of an experiment file is: an immutable model that guesses nothing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the experiment file: unknown fields are refused, values are never guessed from strings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False, validate_default=True
    )
