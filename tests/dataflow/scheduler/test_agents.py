"""The scheduler's hold on its agents: real sockets, played agents."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dataflow.agent.agent import SchedulerSocket
from dataflow.agent.digest import versions
from dataflow.agent.messages import (
    Alive,
    Begin,
    Built,
    Bye,
    End,
    Failed,
    Handed,
    HandedOver,
    HandOver,
    Join,
    Leaves,
    Notice,
    Pause,
    Paused,
    SendSignal,
    Spawn,
    Stay,
    ToWorkers,
)
from dataflow.agent.rendezvous import KEYS_FILE, Rendezvous
from dataflow.errors import DeadlineError, Replaced, RunError
from dataflow.planning.hosts import Host
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control_server import HostsControlServer
from dataflow.scheduler.host_agent import HostAgent, Questions
from dataflow.system.messages import Refused
from dataflow.system.security import RunKeys
from dataflow.worker.messages import Stop

KEYS = RunKeys.make()


JOIN = Join(
    host=Host(name="h1", cpus=2),
    address="127.0.0.1",
    sockets="/dev/shm/of-h1",
    folder="/runs/a",
    pid=7,
    versions=versions(),
)


BEGIN = Begin(
    launch={"module": "m"}, inputs={}, whereabouts={"control": "tcp://127.0.0.1:1", "commands": ""}
)


BUILT = Built(digest="same", files={"a.py": "1"})


DEADLINE_S = 10.0


class PlayedAgent:
    """Speaks for a host."""

    def __init__(self, agents: Agents, name: str, keys: RunKeys = KEYS, **facts: Any) -> None:
        self.line = SchedulerSocket(agents.address, keys, f"{name}/{id(self)}")
        self.said: list[Any] = []
        self.join = structs.replace(JOIN, host=Host(name=name, cpus=2), **facts)
        self.line.say(self.join)

    def say(self, message: Any) -> None:
        self.line.say(message)

    def hands_over(self, agents: Agents, *workers: Handed, question: int | None = None) -> None:
        """Answer a question; None: the newest, once one is there."""
        if question is None:
            until(agents, lambda: self.heard(HandOver))
            question = self.heard(HandOver)[-1].question
        for worker in workers:
            self.say(worker)
        self.say(HandedOver(question=question, alone_s=0.0))

    def heard(self, kind: type[Any]) -> list[Any]:
        self.said += self.line.heard()
        return [each for each in self.said if isinstance(each, kind)]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents("127.0.0.1", KEYS, tmp_path, hang_s=15.0)
    yield made
    made.close(0.0)


def until(agents: Agents, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        agents.live()
        agents.events()
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def told_of(agents: Agents, what: str) -> list[dict[str, Any]]:
    """Events until one of a kind."""
    found: list[dict[str, Any]] = []

    def came() -> bool:
        found.extend(agents.events())
        return any(each["event"] == what for each in found)

    deadline = time.monotonic() + DEADLINE_S
    while not came():
        agents.live()
        assert time.monotonic() < deadline, f"nobody told of {what}"
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def hosts(agents: Agents, *names: str) -> Iterator[list[PlayedAgent]]:
    played = [PlayedAgent(agents, name) for name in names]
    try:
        yield played
    finally:
        for each in played:
            if not each.line.socket.closed:
                each.line.close()


@contextlib.contextmanager
def begun(agents: Agents, *names: str) -> Iterator[list[PlayedAgent]]:
    with hosts(agents, *names) as played:
        agents.assemble(len(names), DEADLINE_S)
        for each in played:
            each.say(BUILT)
        agents.build(BEGIN, BUILT, DEADLINE_S)
        yield played


def settings(host: str, attempt: int = 0) -> dict[str, Any]:
    return {"host": host, "life": [0, attempt]}


def test_a_worker_is_asked_for_on_its_host_and_events_come_from_there(agents: Agents) -> None:
    with begun(agents, "h1", "h2") as (first, second):
        assert [host.name for host in agents.hosts] == ["h1", "h2"]
        assert agents.place("h1") == {
            "sockets": "/dev/shm/of-h1",
            "listen": "127.0.0.1",
            "folder": "/runs/a",
            "disk": "",
        }
        agents.spawn("w-0", settings("h2"), heavy=True, keeps=True)
        agents.kill("w-0", signal.SIGTERM)
        until(agents, lambda: second.heard(Spawn) and second.heard(SendSignal))
        assert second.heard(Spawn) == [Spawn("w-0", settings("h2"), heavy=True, keeps=True)]
        assert second.heard(SendSignal) == [SendSignal("w-0", signal.SIGTERM)]
        assert not first.heard(Spawn) and not first.heard(SendSignal)
        second.say(Notice("exited", "w-0", 12, -9))
        found = told_of(agents, "exited")
        (told,) = [each for each in found if each["event"] == "exited"]
        assert (told["name"], told["host"], told["status"]) == ("w-0", "h2", -9)


def test_hosts_are_counted_as_people_do(agents: Agents) -> None:
    with hosts(agents, "h10", "h2", "h1"):
        agents.assemble(3, DEADLINE_S)
        assert [host.name for host in agents.hosts] == ["h1", "h2", "h10"]


def test_too_few_hosts_are_waited_for_no_longer_than_said_and_those_that_came_are_named(
    agents: Agents,
) -> None:
    with (
        hosts(agents, "h1"),
        pytest.raises(DeadlineError, match=r"waited 0 s for 2 hosts at .*, and these came: h1; "),
    ):
        until(agents, lambda: agents.hosts)
        agents.assemble(2, 0.1)


@pytest.mark.parametrize(("what", "its"), [("Python", "3.9"), ("torch", "1.0"), ("engine", "abc")])
def test_a_host_with_another_version_is_refused_and_both_are_named(
    agents: Agents, what: str, its: str
) -> None:
    its_versions = {**versions(), what: its}
    agent = PlayedAgent(agents, "h1", versions=its_versions)
    with pytest.raises(
        RunError, match=f"host 'h1' has {what} {its} and the scheduler {versions()[what]};"
    ):
        agents.assemble(1, DEADLINE_S)
    until(agents, lambda: agent.heard(Refused))
    agent.line.close()


def test_a_host_with_another_program_is_refused_and_both_are_named(agents: Agents) -> None:
    with hosts(agents, "h1", "h2") as (first, second):
        agents.assemble(2, DEADLINE_S)
        first.say(BUILT)
        second.say(Built(digest="other", files={"a.py": "2", "b.py": "3"}))
        said = (
            r"host 'h2' .*digest other, and .* same; 'a.py' is 2 on it and 1 here; 'b.py' is 3 on"
            r" it and not there"
        )
        with pytest.raises(RunError, match=said):
            agents.build(BEGIN, BUILT, DEADLINE_S)
        until(agents, lambda: second.heard(Refused))


def test_a_host_that_cannot_build_or_ends_while_it_does_ends_the_wait_with_its_reason(
    agents: Agents,
) -> None:
    with hosts(agents, "h1") as (agent,):
        agents.assemble(1, DEADLINE_S)
        agent.say(Failed("no such file"))
        with pytest.raises(RunError, match="no such file"):
            agents.build(BEGIN, BUILT, DEADLINE_S)


def test_an_agent_that_its_launcher_has_lost_ends_the_wait(agents: Agents) -> None:
    agents.watch = lambda: ["the agent of host 'h1' ended with status 3"]
    with pytest.raises(RunError, match="the agent of host 'h1' ended with status 3"):
        agents.assemble(1, DEADLINE_S)


def test_two_hosts_of_one_name_are_refused(agents: Agents) -> None:
    with (
        hosts(agents, "h1", "h1"),
        pytest.raises(RunError, match=r"two hosts .* called 'h1'.*DATAFLOW_AGENT_HOST"),
    ):
        agents.assemble(2, DEADLINE_S)


def test_an_agent_that_was_started_anew_takes_the_place_of_one_that_is_silent(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(agents, "h1"):
        again = PlayedAgent(agents, "h1")
        until(agents, lambda: time.sleep(0.1) or True)
        assert not again.heard(object)
        monkeypatch.setattr(sys.modules[HostAgent.__module__], "_LIVE_S", 0.0)
        again.say(again.join)
        until(agents, lambda: again.heard(Begin))
        again.say(BUILT)
        found = told_of(agents, "joined")
        assert [each["processes"] for each in found if each["event"] == "joined"] == [{}]
        again.line.close()


def test_an_agent_that_has_built_nothing_is_not_taken_over(agents: Agents) -> None:
    agent = PlayedAgent(agents, "h1")
    assert not agents.take_over(BEGIN, None, ["h1"], 0.5)
    until(agents, lambda: agent.heard(End))
    agent.line.close()


def test_an_agent_without_the_runs_keys_hears_nothing_and_is_told_why(agents: Agents) -> None:
    agent = PlayedAgent(agents, "h1", keys=RunKeys.make())
    until(agents, lambda: agent.heard(object) or "keys" in agent.line.trouble)
    assert not agents.hosts and not agent.said
    agent.line.close()


def test_a_port_that_is_taken_is_named(agents: Agents, tmp_path: Path) -> None:
    taken = agents.address.removeprefix("tcp://")
    with pytest.raises(RunError, match=rf"cannot listen at tcp://{taken}: Address already in use"):
        Agents(taken, KEYS, tmp_path, hang_s=15.0)


def test_a_host_whose_agent_is_gone_is_lost_soon_and_once(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((Agents.__module__, "_LIVES_S"), (HostAgent.__module__, "_CLOSED_S")):
        monkeypatch.setattr(sys.modules[module], name, 0.1)
    with begun(agents, "h1", "h2") as (first, _):
        first.line.close()
        found = told_of(agents, "lost")
        lost = [each for each in found if each["event"] == "lost"]
        assert [(each["name"], each["cause"]) for each in lost] == [
            ("h1", "has lost the connection of its agent")
        ]


def test_a_host_that_was_asked_to_end_is_told_of_before_it_does(agents: Agents) -> None:
    with begun(agents, "h1") as (first,):
        first.line.say(Leaves())
        assert told_of(agents, "leaves")[-1]["name"] == "h1"


def test_an_agent_that_gave_its_connection_up_after_a_silence_is_awaited() -> None:
    """It closes a connection that a cut has made useless; one that ends was heard just before."""
    agent = HostAgent(JOIN, b"h1/1", heard_at=100.0)
    agent.closed_since = 100.5
    assert not agent.has_gone(101.0) and agent.has_gone(102.5)
    agent.closed_since = 103.0
    assert not agent.has_gone(110.0)


def test_a_host_that_comes_later_builds_too_and_is_told_once_it_has(agents: Agents) -> None:
    with begun(agents, "h1"):
        agents.stay(1.0, 2.0, 3.0)
        agent = PlayedAgent(agents, "h2")
        until(agents, lambda: agent.heard(Begin) and agent.heard(Stay))
        agent.say(BUILT)
        found = told_of(agents, "joined")
        (joined,) = [each for each in found if each["event"] == "joined"]
        assert (joined["name"], joined["host"].cpus, joined["processes"]) == ("h2", 2, {})
        agent.line.close()


def test_one_that_joins_later_is_not_to_reach_a_host_that_is_silent(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(agents, "h1", "h2") as (first, _):
        monkeypatch.setattr(sys.modules[HostAgent.__module__], "_LIVE_S", 0.5)
        until(agents, lambda: not agents._hosts["h2"].lives(time.monotonic()))
        first.say(Alive())
        until(agents, lambda: agents._hosts["h1"].lives(time.monotonic()))
        agent = PlayedAgent(agents, "h3", reach_address="127.0.0.1|3")
        until(agents, lambda: first.say(Alive()) or agent.heard(Begin))
        assert set(agent.heard(Begin)[0].reach_addresses) == {"h1", "h3"}
        agent.line.close()


def test_a_host_joins_a_run_that_was_taken_over_once_it_has_built_the_same(agents: Agents) -> None:
    agent = PlayedAgent(agents, "h1")
    assert not agents.take_over(BEGIN, BUILT, ["h1"], 0.5)
    until(agents, lambda: agent.heard(Begin))
    agent.say(BUILT)
    assert [each["event"] for each in told_of(agents, "joined")] == ["joined"]
    agent.line.close()


def test_an_agent_that_asks_again_says_what_it_has_and_gets_what_was_lost_on_its_way(
    agents: Agents,
) -> None:
    with begun(agents, "h1") as (agent,):
        for name in ("a-0", "b-0"):
            agents.spawn(name, settings("h1"), heavy=False)
        until(agents, lambda: len(agent.heard(Spawn)) == 2)
        agent.say(agent.join)
        agent.hands_over(agents, Handed("a-0", 5, settings("h1"), 1, alive=False))
        found = told_of(agents, "joined")
        until(agents, lambda: len(agent.heard(Spawn)) == 3)
        assert agent.heard(Spawn)[-1].name == "b-0"
        processes = next(each["processes"] for each in found if each["event"] == "joined")
        assert [(each.name, each.alive, each.status) for each in processes.values()] == [
            ("a-0", False, 1)
        ]


def test_a_host_that_is_cleared_is_told_when_its_workers_have_ended(agents: Agents) -> None:
    with begun(agents, "h1") as (agent,):
        agent.say(agent.join)
        agent.hands_over(agents, Handed("a-0", 5, settings("h1"), None, alive=True))
        found = told_of(agents, "joined")
        agents.clear("h1")
        until(agents, lambda: agent.heard(SendSignal))
        assert agent.heard(SendSignal) == [SendSignal("a-0", signal.SIGKILL)]
        agent.say(Notice("exited", "a-0", 5, -9))
        found = told_of(agents, "joined")
        assert next(each["processes"] for each in found if each["event"] == "joined") == {}


def test_workers_that_end_before_their_host_is_cleared_are_not_waited_for(agents: Agents) -> None:
    with begun(agents, "h1") as (agent,):
        agent.say(agent.join)
        agent.hands_over(agents, Handed("a-0", 5, settings("h1"), None, alive=True))
        agent.say(Notice("exited", "a-0", 5, 1))
        told_of(agents, "exited")
        agents.clear("h1")
        found = told_of(agents, "joined")
        assert [each["processes"] for each in found if each["event"] == "joined"] == [{}]


def test_an_answer_from_before_a_process_was_asked_for_says_nothing_and_another_is_asked_for(
    agents: Agents,
) -> None:
    """Simulation, seed 14733: a host that was given up was taken for empty, and its workers started
    beside themselves. And a process that was not lost was started twice.
    """
    with begun(agents, "h1") as (agent,):
        agent.say(agent.join)
        until(agents, lambda: agent.heard(HandOver))
        agents.spawn("a-0", settings("h1"), heavy=False)
        agent.hands_over(agents, question=agent.heard(HandOver)[-1].question)
        until(agents, lambda: len(agent.heard(HandOver)) == 2)
        assert len(agent.heard(Spawn)) == 1
        agent.hands_over(agents, Handed("a-0", 5, settings("h1"), None, alive=True))
        (joined,) = [each for each in told_of(agents, "joined") if each["event"] == "joined"]
        assert list(joined["processes"]) == ["a-0"] and len(agent.heard(Spawn)) == 1


def test_an_answer_counts_with_all_of_its_workers_though_another_question_leaves_in_its_midst(
    agents: Agents,
) -> None:
    with begun(agents, "h1") as (agent,):
        agents.spawn("a-0", settings("h1"), heavy=False)
        agent.say(agent.join)
        until(agents, lambda: agent.heard(HandOver))
        agent.say(Handed("a-0", 5, settings("h1"), None, alive=True))
        agent.say(agent.join)
        until(agents, lambda: len(agent.heard(HandOver)) == 2)
        agent.hands_over(agents, question=agent.heard(HandOver)[0].question)
        (joined,) = [each for each in told_of(agents, "joined") if each["event"] == "joined"]
        assert list(joined["processes"]) == ["a-0"]


def test_a_host_that_is_asked_while_it_is_cleared_is_not_taken_for_empty_before_it_is(
    agents: Agents,
) -> None:
    with begun(agents, "h1") as (agent,):
        both = [Handed(name, 5, settings("h1"), None, alive=True) for name in ("a-0", "b-0")]
        agent.say(agent.join)
        agent.hands_over(agents, *both)
        told_of(agents, "joined")
        agents.clear("h1")
        agent.say(agent.join)
        until(agents, lambda: len(agent.heard(HandOver)) == 2)
        agent.say(Notice("exited", "a-0", 5, -9))
        agent.hands_over(agents, both[1])
        (joined,) = [each for each in told_of(agents, "joined") if each["event"] == "joined"]
        assert list(joined["processes"]) == ["b-0"]


def test_answers_of_a_host_that_has_left_do_not_bring_it_back(agents: Agents) -> None:
    with begun(agents, "h1") as (agent,):
        agent.say(agent.join)
        until(agents, lambda: agent.heard(HandOver))
        agent.say(Bye())
        agent.hands_over(agents)
        agent.say(Alive())
        found = told_of(agents, "heard")
        assert [each["event"] for each in found] == ["lost", "heard"]


def test_questions_before_a_process_is_asked_for_are_out_of_date() -> None:
    asked = Questions()
    assert not asked.is_open
    first, second = asked.ask(), asked.ask()
    assert asked.is_open and asked.counts(first) and asked.counts(second)
    asked.outdate()
    assert not asked.is_open and not asked.counts(second) and asked.counts(asked.ask())


def test_a_pause_returns_once_all_have_said_so_and_waits_for_nobody_too_long(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(agents, "h1") as (agent,):
        agent.say(Paused(is_paused=True))
        agents.pause(True)
        until(agents, lambda: agent.heard(Pause))
        monkeypatch.setattr(sys.modules[Agents.__module__], "_PAUSE_S", 0.1)
        began = time.monotonic()
        agents.pause(False)
        assert 0.1 <= time.monotonic() - began < 5.0


def test_the_end_is_waited_for_until_all_have_said_goodbye_and_nothing_is_left(
    agents: Agents, tmp_path: Path
) -> None:
    with begun(agents, "h1") as (agent,):
        agents.announce(agents.hosts)
        assert (tmp_path / KEYS_FILE).stat().st_mode & 0o777 == 0o600
        assert Rendezvous.keys(tmp_path) == KEYS
        agent.say(Bye())
        began = time.monotonic()
        agents.close()
        assert time.monotonic() - began < 5.0
        assert agent.heard(End)
        assert list(tmp_path.iterdir()) == []


def test_a_scheduler_that_finds_another_in_its_place_ends_and_removes_nothing(
    agents: Agents, tmp_path: Path
) -> None:
    def holds() -> None:
        raise Replaced("another one has taken the run over")

    with begun(agents, "h1") as (agent,):
        agents.announce(agents.hosts)
        server = HostsControlServer(agents, tmp_path, holds=holds)
        server.send("w-0", Stop(), "h1")
        with pytest.raises(Replaced):
            server.wait(0.0)
        server.leave()
        agents.close()
        assert Rendezvous.read(tmp_path) is not None
        assert not agent.heard(End) and not agent.heard(ToWorkers)


def test_what_is_no_message_is_refused_and_told(agents: Agents) -> None:
    told: list[str] = []
    agents.told = told.append
    agent = PlayedAgent(agents, "h1")
    agent.line.socket.send(b"nothing")
    until(agents, lambda: told)
    assert "refused a message of h1" in told[0]
    agent.line.close()
