"""The tools: a model of the arguments each, whose docstring is what callers are told of the tool."""

from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from openenv_core.tools import Tool

Shelf: TypeAlias = Literal["north", "east", "south", "west"]
SHELVES: Final[tuple[Shelf, ...]] = ("north", "east", "south", "west")


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ListShelves(_Arguments):
    """List the shelves of the store."""


class Look(_Arguments):
    """Tell what lies on one shelf, and how many of each."""

    shelf: Shelf = Field(description="the shelf to look at")


class Submit(_Arguments):
    """Give the answer. This ends the episode."""

    total: int = Field(ge=0, le=1_000_000, description="how many there are on all shelves together")


Call: TypeAlias = ListShelves | Look | Submit

ARGUMENTS: Final[dict[str, type[Call]]] = {"list_shelves": ListShelves, "look": Look, "submit": Submit}
"""Every tool by its name."""


def tools() -> list[Tool]:
    """Return what callers are told of the tools."""
    return [
        Tool(name=name, description=model.__doc__ or "", input_schema=model.model_json_schema())
        for name, model in ARGUMENTS.items()
    ]
