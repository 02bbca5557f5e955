"""One call walks through every room."""

from pathlib import Path

from tests.worlds import World, a_tool, a_world
from toolcalls.effects import Effect
from toolcalls.journal import Head, seal_waiting, verify
from toolcalls.states import diagram


def test_a_read_runs_at_once_and_its_journal_tells_of_it(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        call = world.propose(tool, {"name": "a", "amount": 3})
        assert call.status == "approved"
        world.run()
    call = world.now(call)
    assert (call.status, call.code, call.result) == ("succeeded", "OK", '{"name":"a","amount":3}')
    assert world.moves(call) == ["proposed", "approved", "executing", "succeeded"]


def test_an_allow_list_of_names_lets_the_call_through_at_the_claim_too(database: None) -> None:
    with a_tool(effect=Effect.READ) as tool:
        world = a_world(tools=(tool.name, "other_*"))
        narrow = world.open(allowed_tools=[tool.name])
        calls = [world.propose(tool), world.propose(tool, session=narrow)]
        world.run()
        world.close()
    assert [world.now(call).status for call in calls] == ["succeeded", "succeeded"]


def test_an_unclassified_tool_waits_and_runs_once_approved(world: World) -> None:
    with a_tool() as tool:
        call = world.propose(tool, {"amount": 3})
        world.run()
        assert world.now(call).status == "awaiting_approval"
        world.approve(call)
        world.run()
    assert world.moves(call) == ["proposed", "awaiting_approval", "approved", "executing", "succeeded"]


def test_every_line_is_sealed_and_the_chains_hold(world: World) -> None:
    with a_tool(effect=Effect.READ) as tool:
        for _ in range(3):
            world.propose(tool)
        world.run()
    while seal_waiting(chains=100):
        pass
    heads = list(verify())
    assert all(isinstance(head, Head) for head in heads), heads
    assert sum(head.number for head in heads) > 15


def test_the_state_diagram_of_the_docs_is_the_one_of_the_code() -> None:
    assert diagram() in (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
