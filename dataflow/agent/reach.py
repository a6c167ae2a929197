"""Whether hosts reach each other at the addresses that they say: each has a door, and knocks at those of the others."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping

from dataflow.errors import RunError

KNOCK_S = 5.0
"""For all others to be reached."""
_QUEUE = 4096
"""Hosts that knock at once."""
_AT_ONCE = 128
"""Knocks under way; a process has few files open by default."""
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


class ReachPort:
    """A port at a host's address behind which is nothing. Whoever connects has reached the host."""

    def __init__(self, address: str) -> None:
        """Errors: RunError where this host cannot listen there."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family, backlog=_QUEUE)
        except OSError as error:
            raise RunError(
                f"this host is to be reached at {address}, but cannot listen there: {error.strerror or error}; name an "
                f"address or an interface of this host (DATAFLOW_AGENT_ADDRESS)"
            ) from None
        self._socket.setblocking(False)
        self.place = f"{address}|{self._socket.getsockname()[1]}"
        """For those who knock."""

    def answer(self) -> None:
        """Let go of those who have knocked."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Nobody is to knock any more."""
        self._socket.close()


def unreached(doors: Mapping[str, str], within_s: float = KNOCK_S) -> dict[str, str]:
    """Of these hosts, by name, those that this one does not reach, and why. doors: the place of each."""
    deadline = time.monotonic() + within_s
    waiting, found = sorted(doors.items()), {}
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < _AT_ONCE:
                name, place = waiting.pop()
                knock, number = _knock(place)
                if number in _UNDER_WAY:
                    selector.register(knock, selectors.EVENT_WRITE, (name, place))
                else:
                    knock.close()
                    found[name] = _why(place, number)
            left_s = deadline - time.monotonic()
            for key, _ in selector.select(max(0.0, left_s)):
                _end(selector, key, found)
            if left_s <= 0:
                for key in list(selector.get_map().values()):
                    _end(selector, key, found, errno.ETIMEDOUT)
                found.update((name, _why(place, errno.ETIMEDOUT)) for name, place in waiting)
                return found
    return found


def _knock(place: str) -> tuple[socket.socket, int]:
    address, _, port = place.rpartition("|")
    knock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    knock.setblocking(False)
    return knock, knock.connect_ex((address, int(port)))


def _end(selector: selectors.BaseSelector, key: selectors.SelectorKey, found: dict[str, str], number: int = 0) -> None:
    """Of one knock. number: how it ended, where the kernel does not say."""
    name, place = key.data
    knock = key.fileobj
    assert isinstance(knock, socket.socket), "it was registered"
    selector.unregister(knock)
    number = number or knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    knock.close()
    if number:
        found[name] = _why(place, number)


def _why(place: str, number: int) -> str:
    return f"{place.rpartition('|')[0]} ({os.strerror(number)})"


def check_reach(host: str, doors: Mapping[str, str]) -> None:
    """Refuse a run of which this host does not reach others. Errors: RunError that names them."""
    missed = unreached({name: place for name, place in doors.items() if name != host and place})
    if missed:
        where = ", ".join(f"'{name}' at {why}" for name, why in sorted(missed.items()))
        raise RunError(
            f"host '{host}' does not reach host{'s' if len(missed) > 1 else ''} {where}; each host needs an address "
            f"that all others reach: name its interface or address (DATAFLOW_AGENT_ADDRESS), and let all ports between "
            f"the hosts be open"
        )
