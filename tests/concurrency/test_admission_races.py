"""Proposals at the same time, each over a connection of its own: the database decides, not process memory (section 4)."""

from collections import Counter
from typing import Any

import pytest

from tests.worlds import Script, World, a_tool, a_world, together
from toolcalls import intake, lifecycle
from toolcalls.intake import Answered, Mismatch, Opening
from toolcalls.journal import Head, seal_waiting, verify
from toolcalls.models import Call, Session, Turn
from toolcalls.pipeline import Proposal
from toolcalls.states import UNFINISHED
from toolcalls.tools import Tool

TWENTY = range(20)


def codes(answers: list[Any]) -> Counter[str]:
    stored = dict(
        Call.objects.filter(pk__in=[each.id for each in answers if isinstance(each, Answered)]).values_list(
            "pk", "code"
        )
    )
    return Counter("MISMATCH" if isinstance(each, Mismatch) else _code(each, stored) for each in answers)


def _code(answer: Any, stored: dict[Any, str]) -> str:
    return stored[answer.id] if isinstance(answer, Answered) else str(answer.code)


def test_twenty_equal_posts_make_one_row(world: World) -> None:
    """F-65, F-56: and with other arguments the first wins, whichever it is."""
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        answers = together(*[lambda: world.answer(tool, {"amount": 1}, call_id="c") for _ in TWENTY])
        assert len({each.id for each in answers}) == 1
        assert Counter(each.replayed for each in answers) == {True: 19, False: 1}
        mixed = together(*[lambda n=n: world.answer(tool, {"amount": 50 + n % 2}, call_id="d") for n in TWENTY])
        assert codes(mixed) == {"": 10, "MISMATCH": 10}
        world.run()
    assert tried.applied == 2
    assert Call.objects.count() == 2
    assert Session.objects.get(pk=world.session.pk).calls_used == 2


def test_twenty_calls_of_one_operation_at_once_run_once(world: World) -> None:
    tried = Script()
    with a_tool(tried, effect="idempotent_write") as tool:
        answers = together(*[lambda: world.propose(tool, {"amount": 1}) for _ in TWENTY])
        assert codes(answers) == {"": 1, "DUPLICATE_IN_PROGRESS": 19}
        world.run()
    assert tried.applied == 1


@pytest.mark.parametrize(("budget", "code"), [({"calls": 1}, "STEP_LIMIT"), ({"turns": 1}, "TURN_LIMIT")])
def test_twenty_at_once_against_one_left(world: World, budget: dict[str, int], code: str) -> None:
    session = world.open(**budget)
    with a_tool(effect="read") as tool:
        answers = together(
            *[lambda n=n: world.propose(tool, {"amount": n}, turn=f"turn-{n}", session=session) for n in TWENTY]
        )
    assert codes(answers) == {"": 1, code: 19}
    session.refresh_from_db()
    assert (session.calls_used, session.turns_used) == (1, 1)


def test_two_sessions_that_share_a_limit_never_exceed_it(world: World) -> None:
    sessions = [world.open() for _ in range(2)]
    limit = [{"measure": "amount", "per": "day", "max": 50}]
    with a_tool(effect="idempotent_write", limits=limit) as tool:
        answers = together(
            *[lambda n=n: world.propose(tool, {"amount": 10, "name": f"n{n}"}, session=sessions[n % 2]) for n in TWENTY]
        )
    assert codes(answers) == {"": 5, "POLICY_LIMIT": 15}
    assert sum(each.measures["amount"] for each in Call.objects.filter(status__in=UNFINISHED)) == 50


def test_requests_that_name_limited_tools_the_other_way_round_do_not_wait_for_one_another(world: World) -> None:
    """Locks are taken in one order, so that no request is the victim of a deadlock."""
    sessions = [world.open() for _ in range(8)]
    limit = [{"count": True, "per": "day", "max": 1000}]
    with a_tool(effect="read", limits=limit) as one, a_tool(effect="read", limits=limit) as other:

        def post(session: Session, tools: list[Tool], turn: str) -> Any:
            asked = [Proposal(f"c{n}", each.name, {"amount": n}) for n, each in enumerate(tools)]
            return intake.submit(world.agent, session.session_id, turn, asked)

        for turn in range(5):
            posts = [
                lambda session=session, n=n, turn=turn: post(
                    session, [one, other] if n % 2 else [other, one], f"t{turn}"
                )
                for n, session in enumerate(sessions)
            ]
            for answers in together(*posts):
                assert codes(answers) == {"": 2}


def test_one_session_name_opened_by_many_at_once_is_one_session(world: World) -> None:
    opened = together(
        *[lambda: intake.open_session(world.agent, Opening(session_id="s", body_digest="d")) for _ in TWENTY]
    )
    assert len({session.pk for session, _ in opened}) == 1
    assert Counter(new for _, new in opened) == {True: 1, False: 19}


def test_a_proposal_and_the_cancel_of_its_session_leave_nothing_that_could_still_start(world: World) -> None:
    with a_tool(effect="read") as tool:
        for n in range(5):
            session = world.open()
            answers = together(
                lambda session=session: lifecycle.cancel_session(session.pk, by="test"),
                *[lambda n=n, session=session: world.propose(tool, {"amount": n}, session=session) for n in range(4)],
            )
            assert not [each for each in answers if isinstance(each, BaseException)]
            assert not Call.objects.filter(session=session, status__in=UNFINISHED).exists()


def test_a_proposal_and_the_cancel_of_its_turn_leave_nothing_that_could_still_start(world: World) -> None:
    with a_tool(effect="read") as tool:
        for n in range(5):
            name = f"turn-{n}"
            world.propose(tool, turn=name)
            turn = Turn.objects.get(turn_id=name)
            answers = together(
                lambda turn=turn: lifecycle.cancel_turn(world.session.pk, turn.pk, by="test"),
                *[lambda m=m, name=name: world.propose(tool, {"amount": m}, turn=name) for m in range(4)],
            )
            assert not [each for each in answers if isinstance(each, BaseException)]
            assert not Call.objects.filter(turn=turn, status__in=UNFINISHED).exists()


def test_the_chains_hold_after_many_wrote_at_once(world: World) -> None:
    """F-92: fifty concurrent lines, sealed by several."""
    other = a_world()
    with a_tool() as tool:
        together(*[lambda n=n: (world, other)[n % 2].propose(tool, {"amount": n}) for n in range(24)])
        together(*[lambda: [seal_waiting(chains=10) for _ in range(10)]] * 3)
    heads = list(verify())
    assert all(isinstance(each, Head) for each in heads), heads
    assert sum(each.number for each in heads if isinstance(each, Head)) >= 24 * 3
