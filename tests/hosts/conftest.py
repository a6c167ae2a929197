"""Hosts for tests, where this machine can make them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rigs.hosts import Host, NoHosts, hosts


@pytest.fixture(scope="module")
def give_hosts() -> Iterator[Callable[..., list[Host]]]:
    """Hosts with these names, until the last test of the file has ended; knobs: as of `hosts`."""
    with contextlib.ExitStack() as stack:

        def give(*names: str, **how: Any) -> list[Host]:
            try:
                return stack.enter_context(hosts(*names, **how))
            except NoHosts as error:
                pytest.skip(f"this machine makes no hosts: {error}")

        yield give
