"""Which tools an agent may use: its allow-list, and its session's narrower one. Knows no Django."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def may_use(tool: str, agent_tools: Iterable[str], session_tools: Iterable[str] | None) -> bool:
    """Say whether both lists name this tool; a list holds names or patterns with ``*`` and ``?``."""
    return _listed(tool, agent_tools) and (session_tools is None or _listed(tool, session_tools))


def _listed(tool: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(tool, pattern) for pattern in patterns)


def covers(pattern: str, narrower: str) -> bool:
    """Say whether every tool that ``narrower`` names is named by ``pattern``.

    What a ``*`` of the narrower one may stand for is tried with runs of a character that no tool's name holds: only a
    ``*`` of the pattern names runs of every length.
    """
    stands_for = (narrower.replace("?", "~").replace("*", "~" * length) for length in range(len(pattern) + 2))
    return all(fnmatchcase(name, pattern) for name in stands_for)
