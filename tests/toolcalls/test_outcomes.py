"""Every row of the outcome table (behaviour, section 8), for every effect class and every standing of a call."""

import itertools
from typing import Any

import pytest

from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import Effect
from toolcalls.outcomes import (
    Again,
    Crashed,
    End,
    Ending,
    InDoubt,
    NothingSent,
    Refused,
    Standing,
    Succeeded,
    after,
    doubt_after,
    known_failure,
)

READ, KEYED, SINGLE, UNKNOWN = Effect.READ, Effect.IDEMPOTENT_WRITE, Effect.NON_IDEMPOTENT_WRITE, Effect.UNCLASSIFIED
WRITES = (KEYED, SINGLE, UNKNOWN)
SINGLES = (SINGLE, UNKNOWN)
RETRYABLE = (READ, KEYED)

RETURNED = Succeeded('{"done":true}')
ODD = Succeeded('{"done":null}', warning="result.done: NaN was written as null")
REFUSED = Refused("CARD_DECLINED", "The bank declined.", "do_not_retry")
NOT_SENT = NothingSent("connection refused")
BUSY = NothingSent("503, nothing was done", retry_after=7.0)
DOUBT = InDoubt("CONNECTION_LOST", "the answer was lost")
LOST = InDoubt("WORKER_LOST", "the worker was lost")
LATE = InDoubt("TIMEOUT_UNKNOWN", "no answer in time")
ENDINGS: tuple[Ending, ...] = (RETURNED, ODD, REFUSED, NOT_SENT, BUSY, DOUBT, LOST, LATE, Crashed())


def standing(effect: Effect, **known: Any) -> Standing:
    known.setdefault("only_attempt", not effect.rules.retryable)
    return Standing(rules=effect.rules, **known)


def every_standing(effect: Effect) -> list[Standing]:
    """All that can be true at once: doubt is of writes alone, and nobody goes on after a cancel."""
    found = []
    for doubt, goes_on, cancelled in itertools.product(("", "WORKER_LOST"), (True, False), (True, False)):
        if (doubt and not effect.rules.writes) or (goes_on and (cancelled or not effect.rules.retryable)):
            continue
        found.append(standing(effect, doubt=doubt, may_go_on=goes_on, cancelled=cancelled))
    return found


def ended(ending: Ending, now: Standing) -> tuple[str, str]:
    end = after(ending, now)
    assert isinstance(end, End), end
    return str(end.status), end.code


# -- the table, row by row


@pytest.mark.parametrize("effect", Effect)
def test_what_returned_succeeded_whatever_was_true_before(effect: Effect) -> None:
    for now in every_standing(effect):
        assert ended(RETURNED, now) == ("succeeded", "OK")


@pytest.mark.parametrize("effect", Effect)
def test_a_definite_failure_ends_the_call_and_keeps_the_tools_words(effect: Effect) -> None:
    for goes_on in (True, False):
        end = after(REFUSED, standing(effect, may_go_on=goes_on))
        assert end == End(end.status, "CARD_DECLINED", "The bank declined.", "do_not_retry")  # type: ignore[union-attr]
        assert ended(REFUSED, standing(effect, may_go_on=goes_on)) == ("failed", "CARD_DECLINED")


@pytest.mark.parametrize("effect", RETRYABLE)
def test_nothing_sent_is_tried_again_after_the_delay_that_the_service_asks_for(effect: Effect) -> None:
    assert after(NOT_SENT, standing(effect, may_go_on=True)) == Again(None)
    assert after(BUSY, standing(effect, may_go_on=True)) == Again(7.0)


@pytest.mark.parametrize("effect", SINGLES)
@pytest.mark.parametrize("ending", [NOT_SENT, BUSY])
def test_nothing_sent_by_a_single_attempt_did_not_run(effect: Effect, ending: Ending) -> None:
    end = after(ending, standing(effect))
    assert isinstance(end, End)
    assert (end.status, end.code) == ("failed", "NOT_RUN")
    assert end.message.startswith(DID_NOT_RUN)


@pytest.mark.parametrize("ending", [DOUBT, LOST, LATE])
def test_doubt_is_tried_again_where_a_second_run_is_harmless(ending: Ending) -> None:
    for effect in RETRYABLE:
        assert after(ending, standing(effect, may_go_on=True)) == Again(None)


@pytest.mark.parametrize("ending", [DOUBT, LOST, LATE])
@pytest.mark.parametrize("effect", SINGLES)
def test_doubt_of_a_single_attempt_is_unknown(effect: Effect, ending: InDoubt) -> None:
    for now in every_standing(effect):
        assert ended(ending, now) == ("outcome_unknown", ending.code)


def test_a_crash_is_a_failure_of_a_read_and_unknown_of_a_write() -> None:
    for effect, goes_on in itertools.product(Effect, (True, False)):
        expected = "failed" if effect == READ else "outcome_unknown"
        assert ended(Crashed(), standing(effect, may_go_on=goes_on)) == (expected, "INTERNAL_ERROR")


def test_a_crash_tells_the_agent_nothing_of_the_exception() -> None:
    for effect in Effect:
        end = after(Crashed(), standing(effect))
        assert isinstance(end, End)
        assert end.message == "The tool failed in a way its author did not expect."


def test_a_result_that_cannot_be_kept_fails_a_read_and_warns_of_a_write() -> None:
    """F-51."""
    assert ended(ODD, standing(READ, may_go_on=True)) == ("failed", "INVALID_RESULT")
    for effect in WRITES:
        end = after(ODD, standing(effect, may_go_on=effect.rules.retryable))
        assert end == End(end.status, "OK_WITH_WARNING", ODD.warning)  # type: ignore[union-attr]
        assert ended(ODD, standing(effect)) == ("succeeded", "OK_WITH_WARNING")


@pytest.mark.parametrize("ending", [NOT_SENT, BUSY, DOUBT, LOST, LATE])
def test_a_read_whose_attempts_are_used_up_failed(ending: Ending) -> None:
    """S-C09."""
    assert ended(ending, standing(READ)) == ("failed", "RETRIES_EXHAUSTED")
    assert ended(ending, standing(READ, only_attempt=True)) == ("failed", "UPSTREAM_UNAVAILABLE")


@pytest.mark.parametrize("ending", [DOUBT, LOST, LATE])
def test_a_keyed_write_whose_attempts_are_used_up_in_doubt_is_unknown_under_the_last_code(ending: InDoubt) -> None:
    assert ended(ending, standing(KEYED)) == ("outcome_unknown", ending.code)
    assert ended(ending, standing(KEYED, doubt="CONNECTION_LOST")) == ("outcome_unknown", ending.code)


def test_a_keyed_write_of_which_no_attempt_is_in_doubt_failed_once_they_are_used_up() -> None:
    assert ended(NOT_SENT, standing(KEYED)) == ("failed", "RETRIES_EXHAUSTED")
    assert ended(NOT_SENT, standing(KEYED, only_attempt=True)) == ("failed", "UPSTREAM_UNAVAILABLE")


# -- doubt outlives the attempt


@pytest.mark.parametrize("ending", [REFUSED, NOT_SENT, BUSY])
@pytest.mark.parametrize("effect", WRITES)
def test_no_ending_but_a_success_ends_an_earlier_doubt_as_known(effect: Effect, ending: Ending) -> None:
    for now in every_standing(effect):
        if now.doubt and not now.may_go_on:
            assert ended(ending, now) == ("outcome_unknown", "WORKER_LOST")
    assert ended(REFUSED, standing(effect, doubt="WORKER_LOST", may_go_on=True)) == ("outcome_unknown", "WORKER_LOST")


@pytest.mark.parametrize("effect", WRITES)
def test_a_known_failure_of_any_kind_is_unknown_while_there_is_doubt(effect: Effect) -> None:
    end = known_failure(standing(effect, doubt="TIMEOUT_UNKNOWN"), "NOT_STARTED_IN_TIME", f"{DID_NOT_RUN}: too late.")
    assert (end.status, end.code) == ("outcome_unknown", "TIMEOUT_UNKNOWN")
    assert not end.message.startswith(DID_NOT_RUN)


@pytest.mark.parametrize("effect", Effect)
def test_doubt_is_kept_renewed_and_never_cleared_and_a_read_has_none(effect: Effect) -> None:
    fresh = standing(effect)
    for ending in (RETURNED, ODD, REFUSED, NOT_SENT, BUSY):
        assert doubt_after(ending, fresh) == ""
    assert doubt_after(DOUBT, fresh) == ("CONNECTION_LOST" if effect in WRITES else "")
    assert doubt_after(Crashed(), fresh) == ("INTERNAL_ERROR" if effect in WRITES else "")
    if effect in WRITES:
        doubted = standing(effect, doubt="WORKER_LOST")
        for ending in (REFUSED, NOT_SENT, BUSY):
            assert doubt_after(ending, doubted) == "WORKER_LOST"
        assert doubt_after(LATE, doubted) == "TIMEOUT_UNKNOWN"


# -- cancelled


def test_a_cancelled_call_has_no_further_attempt() -> None:
    for effect, ending in itertools.product(Effect, ENDINGS):
        assert isinstance(after(ending, standing(effect, cancelled=True)), End)


@pytest.mark.parametrize("ending", [NOT_SENT, BUSY, DOUBT, LOST, LATE])
def test_a_cancelled_read_that_did_not_get_through_was_cancelled(ending: Ending) -> None:
    assert ended(ending, standing(READ, cancelled=True)) == ("failed", "CANCELLED")


def test_a_cancelled_keyed_write_is_cancelled_only_where_nothing_is_in_doubt() -> None:
    assert ended(NOT_SENT, standing(KEYED, cancelled=True)) == ("failed", "CANCELLED")
    assert ended(DOUBT, standing(KEYED, cancelled=True)) == ("outcome_unknown", "CONNECTION_LOST")
    assert ended(NOT_SENT, standing(KEYED, cancelled=True, doubt="WORKER_LOST")) == ("outcome_unknown", "WORKER_LOST")


def test_what_a_cancelled_tool_then_really_did_is_what_counts() -> None:
    for effect in Effect:
        now = standing(effect, cancelled=True)
        assert ended(RETURNED, now) == ("succeeded", "OK")
        assert ended(REFUSED, now) == ("failed", "CARD_DECLINED")


# -- over the whole table


def test_only_a_class_that_may_run_again_runs_again_and_only_if_it_may_go_on() -> None:
    for effect in Effect:
        for now, ending in itertools.product(every_standing(effect), ENDINGS):
            if isinstance(after(ending, now), Again):
                assert effect in RETRYABLE
                assert now.may_go_on


def test_a_read_is_never_unknown_and_a_doubted_write_never_failed() -> None:
    """S-C09; behaviour, section 8, "Doubt outlives the attempt"."""
    for effect in Effect:
        for now, ending in itertools.product(every_standing(effect), ENDINGS):
            end = after(ending, now)
            if isinstance(end, End):
                assert effect != READ or end.status != "outcome_unknown"
                assert not doubt_after(ending, now) or end.status in ("succeeded", "outcome_unknown")
                assert end.status in ("succeeded", "failed", "outcome_unknown")
