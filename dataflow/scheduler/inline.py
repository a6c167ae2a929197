"""Runs a whole graph in this process, operators taking turns in a fixed order: for debuggers, tests
and notebooks.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from dataflow.errors import DeadlineError
from dataflow.graph import Graph
from dataflow.node import Generate
from dataflow.planning.plan import Plan
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.worker.changed_knobs import roomiest
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.kept_counts import CrossedByFile
from dataflow.worker.messages import NodeCommand
from dataflow.worker.ports import Ports

_NAP_MS = 5


class InlineRun:
    """One run in one thread; the same seed gives the same losses, bit for bit.

    consumes, produces: the commands of the run state machine, within the process
    waits for: scorer processes, so that their timing cannot change the order
    unblocked by: their answers; after `Limits.stall_s` without any movement the run ends with an
    error
    """

    def __init__(self, graph: Graph, plan: Plan, settings: Settings) -> None:
        self.state, self._limits, self._wish = RunStateMachine(graph, plan), settings.limits, False
        self._ports = Ports(
            roomiest(graph, settings.changes), plan, list(graph.operators), settings
        )
        self.host = NodeLoops(
            graph,
            plan,
            graph.operators,
            settings,
            writer_of=self._ports.writer_of,
            reader_of=self._ports.reader_of,
            device=lambda node: plan.placements[node].device(0),
        )

    def start(self) -> None:
        """Build all operators."""
        self.host.build()
        self._ports.open_inlets(self.host)
        self.host.wire(self._ports.inlets, self._ports.open_outlets(self.host, {}))
        self._pass_on(self.state.start())

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Take turns until the run state machine, or `until`, says that it is over."""
        moved_at = time.monotonic()
        while not self.state.over and not until():
            if self.turn():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > self._limits.stall_s:
                raise DeadlineError(self._stall())
            else:
                time.sleep(0.0005)

    def wish_drain(self, within_s: float) -> None:
        """As `Scheduler.wish_drain`; there are no workers."""
        self._wish = True

    def turn(self) -> bool:
        """One round over all operators."""
        moved = False
        if self._wish and not self.state.draining:
            self._pass_on(self.state.drain())
        for node, loop in self.host.loops.items():
            moved |= loop.turn()
            operator = self.host.graph.operators[node]
            if operator.light or (isinstance(operator, Generate) and operator.asks is not None):
                moved |= self._settle(node)
            self._ports.poll()
        for node, runtime in self.host.runtimes.items():
            self._pass_on(self.state.hear(node, runtime.status()))
            if self.host.loops[node].ended:
                self._pass_on(self.state.ended(node))
        self.host.keep_trace()
        return moved

    def snapshot(self) -> dict[str, Any]:
        """The same facts that a worker's heartbeat carries."""
        return {
            "name": "inline-0",
            "state": "running",
            "nodes": self.host.report(),
            "edges": self._ports.depths(),
            "crossed": self.crossed,
        }

    @property
    def crossed(self) -> CrossedByFile:
        """What has crossed the edges so far; also once it is closed."""
        return self._ports.crossed

    def close(self) -> None:
        """Give everything back."""
        with contextlib.closing(self._ports):
            self.host.close()

    def _settle(self, node: str) -> bool:
        """Let a light operator finish what it has been given, so that its timing leaves no
        trace.
        """
        loop, runtime, moved = self.host.loops[node], self.host.runtimes[node], False
        if self.host.graph.operators[node].kind == "source":
            return moved
        deadline = time.monotonic() + self._limits.stuck_s
        while time.monotonic() < deadline:
            if loop.turn():
                moved = True
            elif runtime.pending() and (waits := runtime.waits()) and not loop.blocked:
                _await(waits)
            else:
                break
        return moved

    def _pass_on(self, commands: list[NodeCommand]) -> None:
        for command in commands:
            self.host.tell(command.node, command.message)

    def _stall(self) -> str:
        state = {name: runtime.status() for name, runtime in self.host.runtimes.items()}
        return (
            f"nothing has moved for {self._limits.stall_s:.0f} s in an inline run; the operators"
            f" say {state}; one of them waits for rows that never come"
        )


def _await(arrivals: Sequence[Any]) -> None:
    """Until something arrives, or a deadline of the operator's own may be over."""
    poller = zmq.Poller()
    for arrival in arrivals:
        poller.register(arrival, zmq.POLLIN)
    poller.poll(_NAP_MS)
