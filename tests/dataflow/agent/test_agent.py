"""An agent that hears nobody; what hosts compare; which address others reach."""

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs
from rigs.graphs import fake_graph
from rigs.machine import wait_until

from dataflow import scorer
from dataflow.agent.agent import UNBEGUN_S, Agent, SchedulerSocket, over
from dataflow.agent.digest import built, other_program, program_files, versions
from dataflow.agent.environment import AgentEnvironment
from dataflow.agent.messages import Begin, Bye, End, Failed, Join, Leaves, Stay
from dataflow.agent.rendezvous import Rendezvous
from dataflow.errors import RunError
from dataflow.history.launch import Launch
from dataflow.planning.hosts import Devices, Host
from dataflow.runner import make_plan
from dataflow.scheduler.host_agent import AgentsSocket
from dataflow.system.addresses import own_address
from dataflow.system.security import RunKeys

STAY = Stay(wait_s=60.0, end_s=120.0, silent_s=30.0)


HOSTS = [Host(name="h1", cpus=2), Host(name="h2", cpus=2)]


@pytest.mark.parametrize(
    ("silent_s", "stays", "keeps", "ends"),
    [
        (UNBEGUN_S - 1, None, True, False),
        (UNBEGUN_S + 1, None, True, True),
        (59.0, STAY, False, False),
        (61.0, STAY, False, True),
        (61.0, STAY, True, False),
        (181.0, STAY, True, True),
    ],
)
def test_an_agent_waits_for_a_scheduler_as_long_as_it_was_told_and_for_workers_that_come_to_an_end(
    silent_s: float, stays: Stay | None, keeps: bool, ends: bool
) -> None:
    assert over(silent_s, stays, keeps=keeps) is ends


def test_the_same_program_has_the_same_digest_and_another_one_is_told_by_its_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.py"
    file.write_text("first")
    launch = Launch(file=str(file), folder=str(tmp_path))
    graph = fake_graph()
    planned = make_plan(graph, devices=Devices.of(HOSTS))
    before = built(graph, planned, launch)
    assert built(fake_graph(), make_plan(fake_graph(), devices=Devices.of(HOSTS)), launch) == before
    file.write_text("second")
    after = built(graph, planned, launch)
    told = other_program("h2", after, before)
    assert before.digest in told and after.digest in told and str(file) in told
    others = built(graph, make_plan(graph, devices=Devices.of(HOSTS[:1])), launch)
    assert others.digest != after.digest and others.files == after.files
    assert "other data or other flags" in other_program("h2", others, after)


def test_the_files_of_a_users_functions_belong_to_the_program() -> None:
    graph = fake_graph(scorers=(scorer(isolate=False)(partial_of_here),))
    assert Path(__file__) in program_files(graph, Launch(module="dataflow.testing"))


def partial_of_here(completion: str) -> float:
    return float(len(completion))


def test_versions_are_those_of_this_process() -> None:
    found = versions()
    assert set(found) == {"Python", "torch", "engine"}
    assert all(found.values()) and found["torch"][0].isdigit()


def test_an_address_is_that_of_an_interface_or_of_the_way_to_the_scheduler() -> None:
    loopback = next(
        name
        for name, all_ in psutil.net_if_addrs().items()
        if any(each.family == socket.AF_INET and each.address == "127.0.0.1" for each in all_)
    )
    assert own_address(loopback, "") == "127.0.0.1"
    assert own_address("10.1.2.3", "") == "10.1.2.3"
    assert own_address("", "tcp://127.0.0.1:80") == "127.0.0.1"
    with pytest.raises(RunError, match=r"no way to tcp://no\.such\.host\.invalid:80"):
        own_address("", "tcp://no.such.host.invalid:80")


def test_a_line_that_nobody_answers_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        line = SchedulerSocket(f"tcp://127.0.0.1:{taken.getsockname()[1]}", RunKeys.make(), "h1/1")
        assert line.heard() == [] and line.trouble == "nobody answers there"
        line.close()


class FastClock:
    """A minute for each hundred looks, in steps that no process is away for."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.6
        return self.now


def agent(
    address: str, keys: RunKeys, folder: Path, clock: Callable[[], float] | None = None
) -> Agent:
    sockets = folder / "sockets"
    sockets.mkdir()
    told = AgentEnvironment(scheduler=address, keys="", folder=str(folder))
    return Agent(told, keys, HOSTS[0], "127.0.0.1", sockets, clock or FastClock())


@pytest.mark.parametrize(
    ("is_there", "said"),
    [
        (
            False,
            (
                r"the scheduler at tcp://.* has not answered for 3\d s: nobody answers there; host"
                r" 'h1' ends"
            ),
        ),
        (True, r"has not answered for 3\d s: .* other keys than this"),
    ],
)
def test_an_agent_that_cannot_join_ends_with_what_is_wrong_and_removes_its_folder(
    is_there: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = AgentsSocket("127.0.0.1", RunKeys.make())
    address = scheduler.address
    if not is_there:
        scheduler.close()
    joins = agent(address, RunKeys.make(), tmp_path)
    try:
        assert joins.run() == 1
    finally:
        if is_there:
            scheduler.close()
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "sockets").exists()


def test_an_agent_turns_to_the_scheduler_that_leads_the_run_now(tmp_path: Path) -> None:
    keys = RunKeys.make()
    before, after = AgentsSocket("127.0.0.1", keys), AgentsSocket("127.0.0.1", keys)
    before.close()
    Rendezvous(address=after.address, hosts=()).write(tmp_path, keys)
    joins = agent(before.address, keys, tmp_path)
    thread = threading.Thread(target=joins.run)
    thread.start()
    try:
        found: list[Any] = []
        wait_until(lambda: found.extend(after.received(print)) or found, 20.0, "the agent")
        assert isinstance(found[0][1], Join) and found[0][1].host.name == "h1"
        after.send(found[0][0], End())
        thread.join(20)
        assert not thread.is_alive()
    finally:
        joins.leave()
        thread.join(20)
        after.close()


def test_an_agent_that_is_asked_to_end_says_so_and_does_where_no_scheduler_has_answered(
    tmp_path: Path,
) -> None:
    keys = RunKeys.make()
    scheduler = AgentsSocket("127.0.0.1", keys)
    joins = agent(scheduler.address, keys, tmp_path, time.monotonic)
    thread = threading.Thread(target=joins.run)
    thread.start()
    try:
        said: list[Any] = []
        wait_until(lambda: said.extend(scheduler.received(print)) or said, 20.0, "the agent")
        joins.leave()
        thread.join(20)
        assert not thread.is_alive()
        wait_until(
            lambda: said.extend(scheduler.received(print)) or isinstance(said[-1][1], Bye),
            20.0,
            "its leave",
        )
        assert [type(message) for _, message in said if isinstance(message, Leaves | Bye)] == [
            Leaves,
            Bye,
        ]
    finally:
        joins.leave()
        thread.join(20)
        scheduler.close()


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_host_that_has_just_died_keeps_nobody_out_and_one_that_is_there_and_not_reached_does(
    is_left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forkserver(begin: Begin, sockets: Path) -> None:
        raise RunError("it would build the graph")

    monkeypatch.setattr(sys.modules[Agent.__module__], "HostForkserver", forkserver)
    keys = RunKeys.make()
    scheduler = AgentsSocket("127.0.0.1", keys)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = Begin(
            launch={},
            inputs={},
            whereabouts={"control": "", "commands": ""},
            reach_addresses={"h2": f"127.0.0.1|{closed.getsockname()[1]}"},
        )
        joins = agent(scheduler.address, keys, tmp_path)
        thread = threading.Thread(target=joins.run)
        thread.start()
        said: list[Any] = []

        def has_failed() -> bool:
            for identity, message in scheduler.received(print):
                said.append(message)
                if isinstance(message, Join):
                    is_first = sum(isinstance(each, Join) for each in said) == 1
                    left = (
                        structs.replace(dead, reach_addresses={})
                        if is_left_out and not is_first
                        else dead
                    )
                    scheduler.send(identity, left)
            return any(isinstance(each, Failed) for each in said)

        try:
            wait_until(has_failed, 20.0, "the end of the agent")
        finally:
            joins.leave()
            thread.join(20)
            scheduler.close()
    expected = "it would build the graph" if is_left_out else "host 'h1' does not reach host 'h2'"
    (failed,) = [each for each in said if isinstance(each, Failed)]
    assert expected in failed.error and sum(isinstance(each, Join) for each in said) > 1
