"""What a rig opened, and a test leaves open as a kill would, is closed when the test has ended."""

import contextlib
from collections.abc import Callable, Iterator

_rigs = contextlib.ExitStack()


def at_end(close: Callable[[], object]) -> None:
    """Have it called after this test."""
    _rigs.callback(close)


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Around one test."""
    with _rigs:
        yield
