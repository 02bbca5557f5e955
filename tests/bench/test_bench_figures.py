"""The arithmetic of the benchmark: a wrong percentile or ratio would praise what is slow."""

import math
from typing import Any

import pytest

from bench import load
from bench.figures import DRAIN, FIVE, ONE, Aim, Measured, aims, as_markdown, percentile
from bench.meters import PARTS


def a_line(name: str, sessions: int, *, rate: float, **other: Any) -> Measured:
    values: dict[str, Any] = {
        "calls": 100, "floor": 1000.0, "milliseconds": [10.0, 20.0], "cpu": dict.fromkeys(PARTS, 0.5), "client_cpu": 0.1,
        "own_commits": 3.0, "writes": 4.0, "log_bytes": 2000.0, "elsewhere": 0.0, "yardstick": 5.0, "faults": {},
    }  # fmt: skip
    return Measured(name, sessions, rate=rate, **values | other)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1), (0.501, 51)])
def test_a_percentile_is_the_nearest_rank(share: float, expected: int) -> None:
    assert percentile([*range(100, 0, -1)], share) == expected


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def test_an_aim_is_met_at_its_bound_on_either_side() -> None:
    assert [Aim("", 0.1, reached).met for reached in (0.09, 0.1, 0.2)] == [False, True, True]
    assert [Aim("", 15, reached, at_most=True).met for reached in (14, 15, 15.1)] == [True, True, False]


def test_the_page_holds_every_line_and_says_which_aims_were_missed() -> None:
    lines = [a_line(ONE, 1, rate=90), a_line(ONE, 8, rate=99), a_line(FIVE, 8, rate=200), a_line(DRAIN, 8, rate=250)]
    lines.append(a_line("broken", 8, rate=1, faults={"failed NOT_RUN": 2}))
    assert [aim.met for aim in aims(lines)] == [False, True, True, True]
    about = {
        "cores": 2, "system": "", "python": "", "postgresql": "", "packages": {}, "broker": "pgmq", "worker slots": 8,
        "floor": "pgbench",
    }  # fmt: skip
    page = as_markdown(lines, about=about, command="make bench", at="")
    assert page.count("**missed**") == 1
    assert "failed NOT_RUN" in page
    assert all(f"**{line.ratio:.3f}**" in page for line in lines)


def test_only_calls_that_succeeded_count_and_the_rest_are_faults() -> None:
    counted = load.Load(until=0)
    counted.count(
        b'{"calls": [{"status": "succeeded", "code": "OK"}, {"status":"failed","code":"NOT_RUN"}]}', expected=2, begun=0
    )
    counted.count(b'{"detail": "not found"}', expected=1, begun=0)
    assert counted.calls == 1
    assert counted.faults == {"failed NOT_RUN": 1, '{"detail": "not found"}': 1}
