"""The figures of a run: what was measured per line, the aims, and both as Markdown and JSON."""

import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from bench.meters import PARTS

ONE = "one call a request"
FIVE = "five calls a request"
APPROVED = "propose, approve, read (3 requests)"
DRAIN = "claim to record alone"

SET_UP = (
    "Broker: {broker}. One web process, one worker of {slots} slots, one sweeper, all with their defaults; measured after a "
    "warm-up and an ANALYZE. The floor is three commits per call by {floor}, with as many clients, on the same server, just before each line."
)
ABOUT_RATES = (
    "Times are from the first POST to the final result. Per call: the `commits` that moved it; all transactions that "
    "`writes` counts, so with seals, bells, notices and heartbeats; kB of write-ahead log. `others`: cores that anything else "
    "on this machine kept busy meanwhile. `yardstick`: ms of CPU for a fixed piece of Python just before the line; where it is "
    "twice as large, the machine was half as fast."
)
ABOUT_CPU = (
    "CPU per call in milliseconds, until every journal line was sealed. `pg …` is PostgreSQL's for the connections of that "
    "part, `pg broker` for those that speak to the queues, `pg rest` its background processes. The client's comes out of the "
    "same cores."
)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below `share` (0 to 1) of all values: the nearest rank."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Measured:
    """One line of the result. Rates are per second, times in milliseconds, sizes in bytes, CPU in ms per call.

    floor: what pgbench reached with as many clients just before. own_commits: commits per call that moved it.
    writes: all write transactions per call. elsewhere: how many cores others kept busy meanwhile. yardstick: the CPU
    time of a fixed piece of Python just before.
    """

    name: str
    sessions: int
    calls: int
    rate: float
    floor: float
    milliseconds: list[float] = field(repr=False)
    cpu: dict[str, float]
    client_cpu: float
    own_commits: float
    writes: float
    log_bytes: float
    elsewhere: float
    yardstick: float
    faults: dict[str, int]

    @property
    def ratio(self) -> float:
        """The share of the floor that was reached."""
        return self.rate / self.floor

    @property
    def all_cpu(self) -> float:
        """The CPU per call of the whole product, without the client, in milliseconds."""
        return sum(self.cpu.values())


@dataclass(frozen=True)
class Aim:
    """One aim of the product (performance notes): `reached` is compared with `wanted`."""

    text: str
    wanted: float
    reached: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Tell whether the aim was reached."""
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted


def aims(measured: Sequence[Measured]) -> list[Aim]:
    """Hold the lines against the aims."""
    by = {(line.name, line.sessions): line for line in measured}
    eight, drain = by[ONE, 8].ratio, by[DRAIN, 8].ratio
    return [
        Aim("share of the floor at 8 sessions", 0.10, eight),
        Aim("share of the floor at 8 sessions, five calls a request", 0.20, by[FIVE, 8].ratio),
        Aim("p50 from POST to final at 1 session, ms", 15, percentile(by[ONE, 1].milliseconds, 0.5), at_most=True),
        Aim("share of the floor, claim to record alone", 0.25, drain),
    ]


def machine(*, cores: int, postgresql: str, floor: str, broker: str, slots: int) -> dict[str, Any]:
    """Name what the figures depend on."""
    packages = ("django", "celery", "kombu", "psycopg", "uvicorn")
    return {
        "cores": cores,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "postgresql": postgresql,
        "broker": broker,
        "worker slots": slots,
        "floor": floor,
        "packages": {name: version(name) for name in packages},
    }


def as_markdown(measured: Sequence[Measured], *, about: dict[str, Any], command: str, at: str) -> str:
    """The page of a run."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    machine = f"{about['cores']} cores, {about['system']}, Python {about['python']}, PostgreSQL {about['postgresql']}"
    faults = [f"- {line.name}, {line.sessions}: {line.faults}" for line in measured if line.faults]
    parts = [
        f"# Benchmark of {at}",
        f"`{command}`",
        f"{machine}; {packages}.",
        SET_UP.format(broker=about["broker"], slots=about["worker slots"], floor=about["floor"]),
        _table(
            ["calls", "sessions", "calls/s", "floor/s", "of the floor", "p50 ms", "p99 ms", "commits", "writes", "log kB",
             "others", "yardstick"],
            [
                [line.name, line.sessions, f"{line.rate:.0f}", f"{line.floor:.0f}", f"**{line.ratio:.3f}**",
                 _time(percentile(line.milliseconds, 0.5)), _time(percentile(line.milliseconds, 0.99)),
                 f"{line.own_commits:.2f}", f"{line.writes:.2f}", f"{line.log_bytes / 1000:.1f}", f"{line.elsewhere:.2f}",
                 f"{line.yardstick:.1f}"]
                for line in measured
            ],
        ),
        ABOUT_RATES,
        _table(
            ["calls", "sessions", *PARTS, "all", "client"],
            [
                [line.name, line.sessions, *(f"{line.cpu[part]:.2f}" for part in PARTS), f"**{line.all_cpu:.2f}**",
                 f"{line.client_cpu:.2f}"]
                for line in measured
            ],
        ),
        ABOUT_CPU,
        _table(
            ["aim", "wanted", "reached", ""],
            [
                [aim.text, f"{'at most' if aim.at_most else 'at least'} {aim.wanted:g}", f"{aim.reached:.3g}",
                 "met" if aim.met else "**missed**"]
                for aim in aims(measured)
            ],
        ),
    ]  # fmt: skip
    if faults:
        parts.append("Calls that did not end as they should:\n\n" + "\n".join(faults))
    return "\n\n".join(parts) + "\n"


def as_json(measured: Sequence[Measured], *, about: dict[str, Any], command: str, at: str) -> dict[str, Any]:
    """The same for programs, with every figure unrounded."""
    lines = [
        {
            **{name: value for name, value in vars(line).items() if name != "milliseconds"},
            "ratio": line.ratio,
            "p50": _known(percentile(line.milliseconds, 0.5)),
            "p99": _known(percentile(line.milliseconds, 0.99)),
        }
        for line in measured
    ]
    return {
        "at": at,
        "command": command,
        "machine": about,
        "lines": lines,
        "aims": [{**vars(aim), "met": aim.met} for aim in aims(measured)],
    }


def _time(milliseconds: float) -> str:
    return "" if math.isnan(milliseconds) else f"{milliseconds:.1f}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def command_line(seconds: float) -> str:
    """The command that repeats the run."""
    return "make bench" if seconds == 10 else f"python -m bench --seconds {seconds:g}"


def say(text: str) -> None:
    """Tell whoever waits how far the run is."""
    print(text, file=sys.stderr, flush=True)
