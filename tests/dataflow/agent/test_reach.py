"""Hosts find out whether they reach each other, and what an agent says last reaches the user."""

import socket
from pathlib import Path

import pytest

from dataflow.agent.reach import ReachPort, check_reach, unreached
from dataflow.agent.rendezvous import FinalNotices, leave, take_back
from dataflow.errors import RunError

NOWHERE = "192.0.2.1|9"
"""Of the addresses that are nobody's (RFC 5737): it does not answer, or there is no way to it."""


def test_hosts_that_others_do_not_reach_are_named_with_their_address_and_why() -> None:
    port, many = ReachPort("127.0.0.1"), [ReachPort("127.0.0.1") for _ in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1|{server.getsockname()[1]}"
    try:
        reach_addresses = {f"h{number}": each.address for number, each in enumerate([port, *many])}
        assert unreached(reach_addresses) == {}
        found = unreached({**reach_addresses, "x": NOWHERE, "y": closed}, 0.2)
        assert set(found) == {"x", "y"} and found["y"] == "127.0.0.1 (Connection refused)"
        assert found["x"].startswith("192.0.2.1 (")
        check_reach("y", {**reach_addresses, "y": closed, "old": ""})
        with pytest.raises(
            RunError,
            match=r"host 'h1' does not reach host 'y' at 127\.0\.0\.1 \(Connection refused\)",
        ):
            check_reach("h1", {**reach_addresses, "y": closed})
    finally:
        for each in (port, *many):
            each.answer()
            each.close()


def test_very_many_hosts_are_reached_though_few_files_may_be_open() -> None:
    port = ReachPort("127.0.0.1")
    try:
        assert unreached({f"h{number}": port.address for number in range(500)}) == {}
    finally:
        port.close()


def test_a_host_that_cannot_listen_at_its_address_says_so() -> None:
    with pytest.raises(RunError, match=r"to be reached at 192\.0\.2\.1, but cannot listen there"):
        ReachPort("192.0.2.1")


def test_what_an_agent_says_last_is_told_once_and_what_stood_there_before_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    leave(tmp_path, "h0", "of an earlier run")
    clock = iter(range(0, 100, 2))
    words = FinalNotices(tmp_path, lambda: next(clock))
    leave(tmp_path, "h1", "no keys")
    assert words.new() == ["no keys"] and words.new() == []
    take_back(tmp_path, "h1")
    take_back(tmp_path, "h2")
    assert words.new() == []
    leave(tmp_path / "nowhere", "h1", "nobody hears it")
