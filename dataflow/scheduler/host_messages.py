"""What passes between a scheduler and the workers on its hosts, on its way through their agents:
one message each."""

from collections.abc import Iterator

from dataflow.agent.messages import FromWorkers, ToWorkers

_A_SECOND = 1024
"""Heartbeats that a scheduler takes in, at most, so that they cost it a fraction of a core."""
_SLOWER = 1.25
"""So much longer than before is worth a message to all agents."""
_MISSED = 3
"""So many heartbeats may get lost before a worker seems to hang."""


class HostMessages:
    """Of all hosts.

    consumes: what agents pass on; messages for workers
    produces: who said what; a message for each host that has a worker which is to hear something
    waits for: nothing
    unblocked by: -
    """

    def __init__(self, hang_s: float) -> None:
        """hang_s: after so much silence a worker is taken to hang."""
        self.beat_s = 0.2
        """Between two heartbeats of a worker that are passed on."""
        self._most_s = hang_s / _MISSED
        self._heard: list[tuple[str, str, bytes]] = []
        self._tells: dict[str, tuple[list[str], list[bytes]]] = {}

    def slows(self, workers: int) -> bool:
        """Whether workers have become so many that they are to be heard less often."""
        wanted = min(workers / _A_SECOND, self._most_s)
        if wanted > self.beat_s * _SLOWER:
            self.beat_s = wanted
            return True
        return False

    def take(self, host: str, said: FromWorkers) -> None:
        """The agent of a host passes on."""
        self._heard += zip([host] * len(said.names), said.names, said.messages, strict=True)

    def heard(self) -> list[tuple[str, str, bytes]]:
        """Where who has said what since the last call."""
        found, self._heard = self._heard, []
        return found

    def say(self, name: str, host: str, message: bytes) -> None:
        """Something for the worker of that name on a host; nobody hears it where none is."""
        names, messages = self._tells.setdefault(host, ([], []))
        names.append(name)
        messages.append(message)

    def tells(self) -> Iterator[tuple[str, ToWorkers]]:
        """What leaves now, by host."""
        tells, self._tells = self._tells, {}
        for host, (names, messages) in tells.items():
            yield host, ToWorkers(names=names, messages=messages)
