"""Hosts that share an address and a secret learn which run they join; nobody else does."""

import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.launchers.joining import JOIN

from dataflow.errors import DeadlineError, GraphError, RunError
from dataflow.launchers.torchrun import (
    SECRET,
    SECRET_FILE,
    BootstrapServer,
    LaunchRanks,
    ask,
    secret_keys,
)
from dataflow.system.security import RunKeys

ONE, OTHER = (secret_keys({SECRET: letter * 32}) for letter in "ab")


@pytest.fixture
def address() -> str:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{trial.getsockname()[1]}"


@pytest.fixture
def server(address: str) -> Iterator[BootstrapServer]:
    """One that is looked after until the test ends."""
    made, over = BootstrapServer(address, ONE, JOIN), threading.Event()

    def tend() -> None:
        while not over.wait(0.01):
            made.answer()

    tending = threading.Thread(target=tend)
    tending.start()
    yield made
    over.set()
    tending.join()
    made.close()


def test_who_has_the_secret_is_told_which_run_it_joins(
    address: str, server: BootstrapServer
) -> None:
    told = ask(address, ONE, 3, 10.0)
    assert (told.scheduler, told.folder, told.keys) == (JOIN.address, JOIN.folder, JOIN.keys)
    assert server.asked == {3}


def test_a_host_may_ask_before_somebody_is_there_who_answers(address: str) -> None:
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(ask(address, ONE, 1, 20.0)))
    asking.start()
    made = BootstrapServer(address, ONE, JOIN)
    while asking.is_alive():
        made.answer()
        asking.join(0.01)
    made.close()
    assert found


def test_who_has_another_secret_is_told_nothing(address: str, server: BootstrapServer) -> None:
    with pytest.raises(DeadlineError, match=r"rank 1 waited 1 s for rank 0 .* the same secret"):
        ask(address, OTHER, 1, 0.6)
    assert not server.asked


def test_a_port_that_is_taken_is_told(address: str, server: BootstrapServer) -> None:
    with pytest.raises(
        RunError, match=f"MASTER_PORT, the same on all.* cannot listen at {address}"
    ):
        BootstrapServer(address, ONE, JOIN)


def test_the_same_secret_gives_the_same_keys_from_a_variable_and_from_a_file(
    tmp_path: Path,
) -> None:
    place = tmp_path / "secret"
    place.write_text("a" * 32 + "\n")
    place.chmod(0o600)
    keys = secret_keys({SECRET_FILE: str(place)})
    assert keys == ONE != OTHER and isinstance(keys, RunKeys)
    assert ONE.receivers.secret != ONE.senders.secret


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "secret"
    place.write_text("a" * 32)
    place.chmod(mode)
    with pytest.raises(GraphError, match=f"others may read .*{mode:04o}"):
        secret_keys({SECRET_FILE: str(place)})


@pytest.mark.parametrize("environ", [{}, {SECRET: "short"}, {SECRET_FILE: "/nowhere"}])
def test_without_a_secret_nobody_joins(environ: dict[str, str]) -> None:
    with pytest.raises(GraphError, match=r"no characters|5 characters|cannot be read"):
        secret_keys(environ)


RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_environment_says_which_place_a_process_has() -> None:
    found = LaunchRanks.of(RANK)
    assert found == LaunchRanks(rank=1, hosts=4, leads_host=True, master="10.0.0.1", port=29501)
    on_two = LaunchRanks.of({**RANK, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert on_two == dataclasses.replace(found, hosts=2, leads_host=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', which is no number"),
        ({"RANK": "4"}, "RANK 4 of WORLD_SIZE 4"),
        ({"LOCAL_WORLD_SIZE": "3"}, "3 on each host"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT 65535 cannot be"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        LaunchRanks.of({**RANK, **change})
