"""A connection of an agent to its scheduler that swallows what it is given, and is then replaced:
nothing is lost.
"""

from collections.abc import Iterator

import pytest
from rigs.cable import Cable
from rigs.machine import wait_until

from dataflow.agent.agent import SchedulerSocket
from dataflow.agent.messages import Alive, Failed, SendSignal
from dataflow.scheduler.host_agent import AgentsSocket
from dataflow.system.security import RunKeys
from transport import numbered


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentsSocket, Cable, SchedulerSocket]]:
    monkeypatch.setattr(numbered, "AGAIN_S", 0.1)
    keys = RunKeys.make()
    scheduler = AgentsSocket("127.0.0.1", keys)
    cable = Cable(scheduler.address)
    line = SchedulerSocket(cable.address, keys, "h1/1")
    yield scheduler, cable, line
    line.close()
    cable.close()
    scheduler.close()


def test_nothing_is_lost_or_said_twice_when_a_connection_is_replaced(
    ends: tuple[AgentsSocket, Cable, SchedulerSocket],
) -> None:
    scheduler, cable, line = ends
    by_agent: list[str] = []
    by_scheduler: list[int] = []

    def turn() -> None:
        line.say(Alive())
        found = line.heard()
        by_scheduler.extend(each.number for each in found if isinstance(each, SendSignal))
        messages = scheduler.received(print)
        by_agent.extend(message.error for _, message in messages if isinstance(message, Failed))
        scheduler.send(b"h1/1", Alive())

    def exchange(numbers: range) -> None:
        for number in numbers:
            line.say(Failed(str(number)))
            scheduler.send(b"h1/1", SendSignal("a-0", number))

    def have(count: int) -> bool:
        turn()
        return len(by_agent) >= count and len(by_scheduler) >= count

    wait_until(lambda: turn() or scheduler.send(b"h1/1", Alive()), 10.0, "the connection")
    exchange(range(3))
    wait_until(lambda: have(3), 10.0, "what was said before the cut")
    cable.is_cut = True
    exchange(range(3, 6))
    for _ in range(20):
        turn()
        line.socket.poll(10)
    assert len(by_agent) == 3
    cable.replace()
    wait_until(lambda: have(6), 10.0, "what was said during the cut")
    exchange(range(6, 9))
    wait_until(lambda: have(9), 10.0, "what was said after the cut")
    assert by_agent == [str(number) for number in range(9)] and by_scheduler == list(range(9))
