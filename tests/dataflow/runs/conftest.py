"""What the tests of this room look at."""

from pathlib import Path

import pytest
from runs_made import one_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run; nobody writes in it."""
    return one_run(tmp_path_factory.mktemp("runs"))
