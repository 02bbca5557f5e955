"""What a tool's author uses, and the registry of what authors wrote.

A tool is a function in an app's ``tools.py``; its name, docstring and annotation are the name, description and schema
that a model sees (architecture, point 7)::

    @tool(effect=Effect.READ)
    def get_order(arguments: GetOrder, context: ToolContext) -> Order:
        \"\"\"Look up one order.\"\"\"
"""

import hashlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel

from toolcalls import codes
from toolcalls.policy import InvalidPolicy, Policy, declared

Hook = TypeVar("Hook", bound=Callable[..., Any])
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
CODE = re.compile(r"[A-Z][A-Z0-9_]{1,63}", re.ASCII)
IN_DOUBT_CODES = ("CONNECTION_LOST", "TIMEOUT_UNKNOWN")


class ToolRejected(Exception):
    """Raise this to say that the tool failed for good, and that nothing took effect by this attempt.

    ``code`` is the tool's own stable word, in capitals; ``retry`` is the advice to the agent, by default
    ``correct_and_call``. Raises ValueError for a code that is not such a word or is one of the system's.
    """

    def __init__(self, code: str, message: str, *, retry: str = "") -> None:
        if not CODE.fullmatch(code) or code in codes.KNOWN:
            raise ValueError(f"a tool's own code is a word in capitals that the system does not use itself: {code!r}")
        super().__init__(message)
        self.code, self.message, self.retry = code, message, str(codes.Retry(retry)) if retry else ""


class NotRun(Exception):
    """Raise this when provably nothing was sent, or the service promised that it did nothing.

    ``retry_after`` is the delay in seconds that the service asked for.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


class InDoubt(Exception):
    """Raise this when the effect may have happened: sent, but not answered. ``code`` is one of IN_DOUBT_CODES."""

    def __init__(self, message: str, *, code: str = "CONNECTION_LOST") -> None:
        if code not in IN_DOUBT_CODES:
            raise ValueError(f"the code of a doubt is one of {IN_DOUBT_CODES}, not {code!r}")
        super().__init__(message)
        self.message, self.code = message, code


@dataclass(frozen=True)
class Result:
    """Return this to keep the service's raw answer apart from what the model is shown."""

    shown: Any
    raw: Any = None


@dataclass(frozen=True)
class Found:
    """A look-up's answer: the service holds the effect; ``result`` is its receipt."""

    result: Any


@dataclass(frozen=True)
class NotFound:
    """A look-up's answer: the service does not hold the effect. Proof only where the policy says so."""


@dataclass
class ToolContext:
    """What a running tool knows of its call.

    idempotency_key: ``session/turn/call``, the same for every attempt; pass it to the service.
    key_digest: the same in 32 characters. attempt: 1 for the first. deadline: stop by then.
    on_behalf_of: words of the agent, unverified.
    """

    idempotency_key: str
    key_digest: str
    attempt: int
    deadline: datetime
    agent: str
    on_behalf_of: str
    spent: int = 0
    _ask_cancelled: Callable[[], bool] = field(default=lambda: False, repr=False)

    @property
    def cancelled(self) -> bool:
        """Say whether somebody asked this call to stop; a tool that can stop half-way looks here."""
        return self._ask_cancelled()

    def spend(self, amount: int) -> None:
        """Count ``amount`` (whole units of the session's spend budget, zero or more) as spent by this attempt."""
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < 0:
            raise ValueError("an amount spent is a whole number, zero or more")
        self.spent += amount


ToolFunction = Callable[[Any, ToolContext], Any]


@dataclass
class Tool:
    """One tool as its author wrote it: the function, its schema, its declared policy and its hooks."""

    name: str
    description: str
    function: ToolFunction
    arguments: type[BaseModel]
    result: type[BaseModel] | None
    policy: Policy
    measures: dict[str, Callable[[Any], Any]]
    author_version: str
    run_check: Callable[[Any, ToolContext], None] | None = None
    run_summary: Callable[[Any], str] | None = None
    run_find_outcome: Callable[[Any, str], Found | NotFound] | None = None

    def __post_init__(self) -> None:
        self.schema: dict[str, Any] = self.arguments.model_json_schema()
        shape = json.dumps(_without_docstrings(self.schema), sort_keys=True)
        digest = hashlib.sha256(shape.encode()).hexdigest()[:12]
        self.version = f"{self.author_version}+{digest}"

    def __call__(self, arguments: Any, context: ToolContext) -> Any:
        return self.function(arguments, context)

    def check(self, hook: Hook) -> Hook:
        """Register the business rules: ``hook(arguments, context)`` reads only, and raises ToolRejected."""
        self.run_check = hook
        return hook

    def summary(self, hook: Hook) -> Hook:
        """Register ``hook(arguments) -> str``, one sentence for the person who decides."""
        self.run_summary = hook
        return hook

    def find_outcome(self, hook: Hook) -> Hook:
        """Register ``hook(arguments, key) -> Found | NotFound``, which looks the effect up by its key."""
        self.run_find_outcome = hook
        return hook


class InvalidTool(Exception):
    """A tool that cannot be registered; the text says which and why. It stops the start."""


_registry: dict[str, Tool] = {}


def tool(
    *, version: str = "1", measures: dict[str, Callable[[Any], Any]] | None = None, **policy: Any
) -> Callable[[ToolFunction], Tool]:
    """Register the decorated function as a tool. ``policy`` takes the policy keys of the interface.

    Raises InvalidTool for a misspelled or contradictory policy, a name outside ``[a-zA-Z0-9_-]{1,64}``, a second tool
    of one name, or a first parameter that is not annotated with a pydantic model.
    """

    def register(function: ToolFunction) -> Tool:
        name = function.__name__
        if not NAME.fullmatch(name):
            raise InvalidTool(f"tool {name!r}: a name is 1 to 64 of a-z, A-Z, 0-9, _ and -")
        if name in _registry:
            raise InvalidTool(f"tool {name!r} is defined twice")
        if not version or not version.isascii() or not version.isprintable() or len(version) > 40:
            raise InvalidTool(f"tool {name!r}: version is 1 to 40 printable ASCII characters, not {version!r}")
        try:
            valid = declared(policy, measures=measures or {})
        except InvalidPolicy as error:
            raise InvalidTool(f"tool {name!r}: {error}") from None
        arguments, result = _models(name, function)
        description = inspect.cleandoc(function.__doc__ or "")
        made = Tool(name, description, function, arguments, result, valid, measures or {}, version)
        _registry[name] = made
        return made

    return register


def find(name: str) -> Tool | None:
    """Give the tool of this exact name, or None."""
    return _registry.get(name)


def every() -> Iterator[Tool]:
    """Iterate over all tools, by name."""
    return iter(sorted(_registry.values(), key=lambda each: each.name))


def _models(name: str, function: ToolFunction) -> tuple[type[BaseModel], type[BaseModel] | None]:
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)
    first = hints.get(parameters[0]) if parameters else None
    if not (inspect.isclass(first) and issubclass(first, BaseModel)) or len(parameters) != 2:
        raise InvalidTool(f"tool {name!r}: it takes (arguments: a pydantic model, context: ToolContext)")
    returned = hints.get("return")
    return first, returned if inspect.isclass(returned) and issubclass(returned, BaseModel) else None


def _without_docstrings(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop what comes from docstrings of models; a field's own description (its unit!) stays part of the version."""

    def stripped(model: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in model.items() if key not in ("description", "title")}

    bare = stripped(schema)
    if "$defs" in bare:
        bare["$defs"] = {name: stripped(model) for name, model in bare["$defs"].items()}
    return bare
