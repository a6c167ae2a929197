"""The places of the product that a simulated world takes: its sockets, its control server, what
leaves a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dataflow.folder import finished
from dataflow.folder.ledger import Ledger
from dataflow.history import resume
from dataflow.records import GROUP_ID
from dataflow.scheduler import agents, control, live_changes
from dataflow.worker import host, ports
from operators import prompts

from .actors import TRAINED, SimulatedScorer
from .hosts import SimulatedAgentsSocket
from .worker import Touching

if TYPE_CHECKING:
    from .world import World


@contextlib.contextmanager
def product(world: World) -> Iterator[None]:
    """The product's sockets and control server are those of this world for a while."""
    append = finished.Finished.append

    def appended(self_: finished.Finished, rows: Any) -> None:
        append(self_, rows)
        assert world.current is not None
        if TRAINED in self_._ending and not world.room.is_fenced(world.current):
            world.durable.update(rows.column(GROUP_ID).to_pylist())
        world.current.point()

    def network(**_: Any) -> Any:
        assert world.current is not None
        return world.network.of(world.current)

    def opened(*values: Any) -> Any:
        return Touching(Ledger.open(*values), world.chair)

    with _replaced(
        (ports, "SocketNetwork", network),
        (
            agents,
            "AgentsSocket",
            lambda listen, keys, number: SimulatedAgentsSocket(world.hosts, number),
        ),
        (control, "ControlServer", lambda *_, **__: world.server),
        (finished.Finished, "append", appended),
        (resume, "_ledger", lambda folder, _: opened(folder.ledger)),
        (prompts, "ROWS_AT_ONCE", world.at_once),
        (live_changes, "Scorer", SimulatedScorer),
        (host, "Scorer", SimulatedScorer),
    ):
        yield


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, new in places:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
