"""Hosts for tests, where this machine can make them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.hosts import Host, NoHosts, hosts
from rigs.hosts.cluster import Cluster


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def known_hosts() -> dict[tuple[str, ...], list[Host]]:
    """Those that tests of this file have, by their names."""
    return {}


@pytest.fixture
def make_cluster(
    give_hosts: Callable[..., list[Host]],
    known_hosts: dict[tuple[str, ...], list[Host]],
    shared: Path,
    tmp_path: Path,
) -> Iterator[Callable[..., Cluster]]:
    """A run over hosts with these names, which the next test of the file finds as they were left;
    its processes end.
    """
    with contextlib.ExitStack() as stack:

        def make(*names: str, **how: Any) -> Cluster:
            if names not in known_hosts:
                known_hosts[names] = give_hosts(*names, shared=[shared], **how)
            folder = shared / tmp_path.name
            folder.mkdir()
            cluster = Cluster(known_hosts[names], folder)
            stack.callback(cluster.kill)
            return cluster

        yield make
