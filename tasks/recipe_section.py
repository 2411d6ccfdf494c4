"""What all sections of a recipe share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RecipeError(ValueError):
    """A recipe that cannot be run: names the field, its value, what was expected and what to do."""


class Section(BaseModel):
    """Base of all recipe sections: unknown fields are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
