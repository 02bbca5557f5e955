"""The doors of one world."""

import pytest

from tests.doors import Door, with_token
from tests.worlds import World


@pytest.fixture
def agent(world: World) -> Door:
    """The world's agent at the API."""
    return Door(world.key)


@pytest.fixture
def ana(world: World) -> Door:
    """A person of the world's team, by personal token."""
    return with_token(world.ana)


@pytest.fixture
def bob(world: World) -> Door:
    """Another person of the world's team, by personal token."""
    return with_token(world.bob)
