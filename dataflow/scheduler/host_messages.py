"""What passes between a scheduler and the workers on its hosts, on its way through their agents: one message each."""

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
        self._host: dict[str, str] = {}
        self._heard: list[tuple[str, bytes]] = []
        self._tells: dict[str, tuple[list[str], list[bytes]]] = {}

    def sits(self, name: str, host: str) -> bool:
        """A worker is started on a host; whether workers have become so many that they are to be heard less often."""
        self._host[name] = host
        wanted = min(len(self._host) / _A_SECOND, self._most_s)
        if wanted > self.beat_s * _SLOWER:
            self.beat_s = wanted
            return True
        return False

    def take(self, said: FromWorkers) -> None:
        """An agent passes on."""
        self._heard += zip(said.names, said.messages, strict=True)

    def heard(self) -> list[tuple[str, bytes]]:
        """Who has said what since the last call."""
        found, self._heard = self._heard, []
        return found

    def say(self, name: str, message: bytes) -> None:
        """Something for a worker; nobody hears it where none is."""
        if name in self._host:
            names, messages = self._tells.setdefault(self._host[name], ([], []))
            names.append(name)
            messages.append(message)

    def tells(self) -> Iterator[tuple[str, ToWorkers]]:
        """What leaves now, by host."""
        tells, self._tells = self._tells, {}
        for host, (names, messages) in tells.items():
            yield host, ToWorkers(names=names, messages=messages)
