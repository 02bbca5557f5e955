"""Tools that do nothing, so that only the product is measured."""

from typing import Any

from pydantic import BaseModel

from toolcalls.effects import Effect
from toolcalls.tools import ToolContext, tool


class Note(BaseModel):
    text: str


@tool(effect=Effect.IDEMPOTENT_WRITE, measures={})
def note(arguments: Note, context: ToolContext) -> dict[str, Any]:
    """Take a note."""
    return {"noted": arguments.text}


@tool(effect=Effect.IDEMPOTENT_WRITE, requires_approval=True, measures={})
def approved_note(arguments: Note, context: ToolContext) -> dict[str, Any]:
    """Take a note once a person has approved it."""
    return {"noted": arguments.text}
