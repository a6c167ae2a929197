"""The kinds of channels that keep one contract."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .rig import Rig


@pytest.fixture
def folder() -> Iterator[Path]:
    """A 0700 folder with a short path."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(params=["local", "ipc", "tcp"])
def rig(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    """Every kind of channel, one after the other."""
    made = Rig(request.param, folder)
    yield made
    made.close()
