"""The journal: every move has its line, the chains hold under fifty writers, and whatever was changed is named."""

import itertools
import threading
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from tests import worlds
from tests.worlds import Script, World, a_tool, let_pass, together
from toolcalls import journal, lifecycle
from toolcalls.effects import Effect
from toolcalls.journal import Broken, Head, Line, seal, seal_waiting, verify
from toolcalls.models import Call, JournalLine, Seal, UnsealedLine
from toolcalls.sweeps import sweep
from toolcalls.tools import InDoubt, NotRun, ToolRejected

READ: dict[str, Any] = {"effect": Effect.READ}
SINGLE: dict[str, Any] = {"effect": Effect.NON_IDEMPOTENT_WRITE, "requires_approval": False}
QUICK: dict[str, Any] = {"effect": Effect.IDEMPOTENT_WRITE, "backoff": 0.001, "backoff_cap": 0.001}


def seal_all() -> None:
    while seal_waiting(chains=100):
        pass


def all_broken() -> list[Broken]:
    return [each for each in verify() if isinstance(each, Broken)]


def broken() -> list[Broken]:
    """What the chains tell, without what calls tell that do not stand where their damaged journal says."""
    return of_the_chain(all_broken())


def of_the_chain(found: list[Broken]) -> list[Broken]:
    return [each for each in found if not each.why.startswith("call ")]


def heads() -> list[Head]:
    return [each for each in verify() if isinstance(each, Head)]


def tamper(statement: str, values: list[Any]) -> None:
    with worlds.past_the_triggers() as cursor:
        cursor.execute(statement, values)


def is_a_chain(world: World, call: Call) -> None:
    """From proposed, each move from where the one before ended, to the state."""
    lines = [line for line in world.journal(call) if line.move is not None]
    assert [line.move for line in lines] == list(range(1, len(lines) + 1))
    assert lines[0].source == "proposed"
    for before, after in itertools.pairwise(lines):
        assert after.source == before.target
    now = world.now(call)
    assert (lines[-1].target, lines[-1].code, len(lines)) == (now.status, now.code, now.moves)
    assert next(line.event for line in world.journal(call)) == "call.proposed"


# -- lines


def test_every_calls_lines_are_a_chain_from_proposed_to_its_state(world: World) -> None:
    """S-G15."""
    calls: list[Call] = []
    with a_tool() as asked:
        calls += [world.propose(asked, {"amount": number}) for number in range(4)]
        world.approve(calls[0], reason="fine")
        world.reject(calls[1], reason="no")
        lifecycle.cancel_call(calls[2].pk, by="test")
        let_pass(100_000, calls[3])
        sweep()
        world.run()
    for script, policy in (
        (Script({"ok": 1}), READ),
        (Script(ToolRejected("DECLINED", "no")), SINGLE),
        (Script(NotRun("busy"), InDoubt("reset"), {"ok": 1}), QUICK),
        (Script(InDoubt("reset")), QUICK),
        (Script(RuntimeError()), SINGLE),
    ):
        with a_tool(script, **policy) as tool:
            calls.append(world.run_to_the_end(world.propose(tool)))
    calls += [world.propose("no_such_tool"), world.propose("no_such_tool", "not json")]
    for call in calls:
        is_a_chain(world, call)


def test_a_line_says_who_from_where_to_where_when_and_which_attempt(world: World) -> None:
    """S-G15, S-B17, S-B18."""
    with a_tool(Script(InDoubt("reset"), {"ok": 1}), **QUICK, requires_approval=True) as tool:
        call = world.propose(tool)
        world.approve(call, reason="The photo shows it: ação ✓")
        world.run_to_the_end(call)
    told = [
        (line.event, line.source, line.target, line.actor.split(":")[0], line.attempt) for line in world.journal(call)
    ]
    assert told == [
        ("call.proposed", "", "proposed", "agent", None),
        ("call.validated", "", "", "agent", None),
        ("call.moved", "proposed", "awaiting_approval", "agent", None),
        ("call.moved", "awaiting_approval", "approved", "user", None),
        ("call.moved", "approved", "executing", "worker", 1),
        ("attempt.ended", "", "", "worker", 1),
        ("attempt.claimed", "", "", "worker", 2),
        ("call.moved", "executing", "succeeded", "worker", 2),
    ]
    decided = world.journal(call)[3]
    assert decided.actor == f"user:{world.ana.username}"
    assert "The photo shows it: ação ✓" in (decided.detail or "")
    assert call.arguments_hash in (decided.detail or "")
    times = [line.at for line in world.journal(call)]
    assert times == sorted(times)


@pytest.mark.parametrize("change", [{"actor": "ceo"}, {"target": "succeeded"}, {"detail": "{}"}, {"event": "x"}])
def test_postgresql_refuses_to_change_a_line(world: World, change: dict[str, Any]) -> None:
    with pytest.raises(DatabaseError, match="append-only"):
        JournalLine.objects.filter(session=world.session).update(**change)


def test_postgresql_refuses_to_remove_a_line_or_to_touch_a_seal(world: World) -> None:
    seal_all()
    for removes in (
        lambda: JournalLine.objects.filter(session=world.session)._raw_delete("default"),
        lambda: Seal.objects.all()._raw_delete("default"),
        lambda: Seal.objects.update(hash="0" * 64),
    ):
        with pytest.raises(DatabaseError), transaction.atomic():
            removes()
    assert broken() == []


def test_postgresql_refuses_a_move_without_its_line(world: World) -> None:
    with a_tool() as tool:
        call = world.propose(tool)
        with pytest.raises(DatabaseError, match="journal line"):
            Call.objects.filter(pk=call.pk).update(
                status="rejected", moves=2, finished_at=call.proposed_at, alarm_at=None
            )
    assert world.now(call).status == "awaiting_approval"


# -- seals


def test_a_chain_is_sealed_in_the_order_of_its_calls_moves(world: World) -> None:
    with a_tool(**READ) as tool:
        call = world.propose(tool)
        world.run()
    seal_all()
    numbers = list(Seal.objects.filter(chain=world.session.pk).order_by("line_id").values_list("number", flat=True))
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > len(world.journal(call))


def test_lines_without_a_session_chain_by_team(world: World) -> None:
    lifecycle.pull_brake(team=world.team, by="test")
    seal_all()
    chained = Seal.objects.filter(chain=world.team.pk).values_list("line__event", flat=True)
    assert {"team.created", "agent.created", "member.set", "brake.pulled"} <= set(chained)


def test_sealing_in_any_number_at_once_seals_each_line_once(world: World) -> None:
    with a_tool(**READ) as tool:
        for number in range(20):
            world.propose(tool, {"amount": number})
    waiting = UnsealedLine.objects.filter(chain=world.session.pk).count()
    sealed = together(*[lambda: seal(world.session.pk)] * 4)
    assert sum(sealed) == waiting
    seal_all()
    assert broken() == []


def test_fifty_writers_and_their_sealers_make_chains_that_hold(world: World) -> None:
    """F-92."""
    writing = threading.Event()
    with a_tool() as tool:
        calls = [world.propose(tool, {"amount": number}) for number in range(50)]

        def decide(mine: list[Call]) -> None:
            for number, call in enumerate(mine):
                (world.approve if number % 2 else world.reject)(call, reason=f"número {number} ✓")

        def seal_meanwhile() -> None:
            while not writing.is_set():
                seal_waiting(chains=10)

        def write() -> None:
            results = together(*[lambda mine=calls[n::10]: decide(mine) for n in range(10)])
            writing.set()
            assert results == [None] * 10, results

        def read_meanwhile() -> None:
            while not writing.is_set():
                assert broken() == [], "a chain that grows is no broken one"

        results = together(write, seal_meanwhile, seal_meanwhile, read_meanwhile)
    assert results == [None] * 4, results
    seal_all()
    assert broken() == []
    for call in calls:
        is_a_chain(world, call)
    assert UnsealedLine.objects.count() == 0
    assert Seal.objects.count() == JournalLine.objects.count()


def test_a_line_that_commits_late_is_sealed_all_the_same(world: World) -> None:
    held = worlds.Held()

    def write_slowly() -> None:
        with transaction.atomic():
            journal.write([Line(world.team.pk, "slow", "test", session=world.session.pk)])
            held.wait()

    with worlds.beside(write_slowly):
        assert held.entered.wait(worlds.WITHIN)
        journal.write([Line(world.team.pk, "quick", "test", session=world.session.pk)])
        seal_all()
        held.let_go()
    seal_all()
    events = Seal.objects.filter(chain=world.session.pk).order_by("number").values_list("line__event", flat=True)
    assert list(events)[-2:] == ["quick", "slow"]
    assert broken() == []


# -- the verifier


@pytest.fixture
def lines(world: World) -> list[JournalLine]:
    """Sealed lines of a session, in order."""
    with a_tool() as tool:
        world.reject(world.propose(tool), reason="no: ação ✓")
        world.propose(tool, {"amount": 2})
    seal_all()
    found = list(JournalLine.objects.filter(session=world.session).order_by("seal__number"))
    assert broken() == []
    return found


@pytest.mark.parametrize(
    "change",
    [
        "actor = 'user:ceo'",
        "target = 'approved'",
        "code = 'OK'",
        "at = at + interval '1 microsecond'",
        "detail_hash = repeat('0', 64)",
        "attempt = 7",
        "move = 9",
        "call_id = NULL",
    ],
)
def test_a_changed_line_is_named(world: World, lines: list[JournalLine], change: str) -> None:
    victim = lines[3]
    tamper(f"UPDATE toolcalls_journalline SET {change} WHERE id = %s", [victim.pk])
    assert [(each.chain, each.line) for each in broken()] == [(world.session.pk, victim.pk)]


def test_a_changed_reason_is_named_and_an_emptied_one_is_no_fault(world: World, lines: list[JournalLine]) -> None:
    victim = next(line for line in lines if line.detail and "ação" in line.detail)
    tamper("UPDATE toolcalls_journalline SET detail = replace(detail, 'no', 'yes') WHERE id = %s", [victim.pk])
    assert [each.line for each in broken()] == [victim.pk]
    JournalLine.objects.filter(pk=victim.pk).update(detail=None)  # retention empties it, once
    assert broken() == []


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_removed_line_is_named(world: World, lines: list[JournalLine], place: int) -> None:
    victim = lines[place]
    tamper("DELETE FROM toolcalls_journalline WHERE id = %s", [victim.pk])
    assert [(each.line, each.why) for each in broken()] == [(victim.pk, "the line is gone")]


def test_a_line_that_was_removed_with_its_seal_leaves_a_gap(world: World, lines: list[JournalLine]) -> None:
    tamper("DELETE FROM toolcalls_seal WHERE line_id = %s", [lines[3].pk])
    tamper("DELETE FROM toolcalls_journalline WHERE id = %s", [lines[3].pk])
    (found,) = broken()
    assert found.line == lines[4].pk
    assert "missing" in found.why


def test_a_cut_tail_shows(world: World, lines: list[JournalLine]) -> None:
    for line in lines[-2:]:
        tamper("DELETE FROM toolcalls_seal WHERE line_id = %s", [line.pk])
        tamper("DELETE FROM toolcalls_journalline WHERE id = %s", [line.pk])
    (found,) = broken()
    assert (found.chain, "ends at" in found.why) == (world.session.pk, True)


def cut_with_its_head(lines: list[JournalLine]) -> None:
    """Cut the tail as somebody would who knows of the head."""
    for line in lines[-2:]:
        tamper("DELETE FROM toolcalls_seal WHERE line_id = %s", [line.pk])
        tamper("DELETE FROM toolcalls_journalline WHERE id = %s", [line.pk])
    last = Seal.objects.get(line=lines[-3])
    tamper(
        "UPDATE toolcalls_session SET sealed_number = %s, sealed_hash = %s WHERE id = %s",
        [last.number, last.hash, last.chain],
    )


def test_a_tail_that_was_cut_with_its_head_shows_against_an_anchor(world: World, lines: list[JournalLine]) -> None:
    anchors = heads()
    cut_with_its_head(lines)
    assert broken() == [], "the chain alone cannot tell"
    assert all_broken() != [], "but the calls do not stand where the journal says"
    found = of_the_chain([each for each in verify(anchors) if isinstance(each, Broken)])
    assert [(each.chain, "anchor" in each.why) for each in found] == [(world.session.pk, True)]


def test_a_chain_that_was_written_anew_shows_against_an_anchor(world: World, lines: list[JournalLine]) -> None:
    anchors = heads()
    cut_with_its_head(lines)
    for _ in range(3):
        journal.write([Line(world.team.pk, "forged", "test", session=world.session.pk)])
    seal_all()
    assert broken() == []
    found = [each for each in verify(anchors) if isinstance(each, Broken)]
    assert [each.chain for each in of_the_chain(found)] == [world.session.pk]


def test_a_chain_that_only_grew_still_passes_through_its_anchor(world: World, lines: list[JournalLine]) -> None:
    anchors = heads()
    with a_tool(**READ) as tool:
        world.propose(tool)
    seal_all()
    assert [each for each in verify(anchors) if isinstance(each, Broken)] == []


def test_a_chain_that_is_gone_altogether_shows_against_an_anchor(world: World, lines: list[JournalLine]) -> None:
    anchors = heads()
    tamper("DELETE FROM toolcalls_session WHERE id = %s", [world.session.pk])
    gone = [each for each in verify(anchors) if isinstance(each, Broken)]
    assert [(each.chain, each.why) for each in gone] == [(world.session.pk, "the whole chain is gone")]


def test_a_changed_seal_or_head_is_found(world: World, lines: list[JournalLine]) -> None:
    tamper("UPDATE toolcalls_seal SET hash = repeat('a', 64) WHERE line_id = %s", [lines[2].pk])
    assert [each.line for each in broken()] == [lines[2].pk]


def test_only_the_broken_chain_is_named(world: World, lines: list[JournalLine]) -> None:
    other = worlds.a_world()
    with a_tool(**READ) as tool:
        other.propose(tool)
    seal_all()
    tamper("UPDATE toolcalls_journalline SET actor = 'x' WHERE id = %s", [lines[1].pk])
    found = list(verify())
    assert [each.chain for each in found if isinstance(each, Broken)] == [world.session.pk]
    assert other.session.pk in [each.chain for each in found if isinstance(each, Head)]


@pytest.mark.parametrize(
    "change",
    ["status = 'failed'", "moves = moves + 1", "code = 'X'", "result = '[]'", "arguments = '[]'"],
)
def test_a_call_that_is_not_what_its_journal_and_hashes_say_is_named(
    world: World, lines: list[JournalLine], change: str
) -> None:
    with a_tool(**READ) as tool:
        call = world.propose(tool, {"amount": 77})
        world.run()
    assert world.now(call).status == "succeeded"
    tamper(f"UPDATE toolcalls_call SET {change} WHERE id = %s", [call.pk])
    assert [str(call.pk) in each.why for each in all_broken()] == [True]


def test_a_line_that_was_kept_from_being_sealed_is_named(world: World, lines: list[JournalLine]) -> None:
    journal.write([Line(world.team.pk, "note", "test", session=world.session.pk)])
    tamper("DELETE FROM toolcalls_unsealedline WHERE chain = %s", [world.session.pk])
    assert [each.why for each in broken()] == ["the line was taken out of the chain"]
