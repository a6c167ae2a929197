"""The hosts of a run: gathered by a launcher, or found with the workers of a scheduler that has died."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dataflow.agent.digest import built
from dataflow.agent.messages import Begin
from dataflow.agent.rendezvous import KEYS_FILE
from dataflow.errors import GraphError
from dataflow.folder.run_folder import RunFolder
from dataflow.graph import Graph
from dataflow.history.launch import Launch, this_launch
from dataflow.launchers.launcher import Joining, Launcher
from dataflow.limits import Limits
from dataflow.planning.hosts import Host
from dataflow.planning.inputs import PlanInputs
from dataflow.planning.plan import Plan
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control_server import HostsControlServer
from dataflow.system.security import RunKeys

FOUND_S = 10.0
"""For the agents of a scheduler that has died to come to this one: they look for it every few seconds."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Whom a run on several hosts has, and what it has to say to them."""

    agents: Agents
    folder: RunFolder
    launch: Launch
    limits: Limits
    devices: tuple[Host, ...]
    """In the order of the plan."""
    was_there: bool = False
    """Whether they have workers of a scheduler before this one."""

    def serve(self, graph: Graph, plan: Plan, inputs: PlanInputs) -> HostsControlServer:
        """Have every host build the same graph, and be ready. Errors: RunError; DeadlineError."""
        server = HostsControlServer(self.agents, self.folder.path)
        self.agents.announce(self.devices)
        begin = Begin(launch=vars(self.launch), inputs=inputs.to_plain(), whereabouts=asdict(server.whereabouts))
        self.agents.build(begin, built(graph, plan, self.launch), self.limits.start_s)
        return server


@contextlib.contextmanager
def gathered(
    launcher: Launcher, folder: RunFolder, launch: Launch | None, listen: str, limits: Limits
) -> Iterator[Hosts]:
    """As many hosts as the launcher has, for as long as the block lasts; what was started ends with it.

    launch: the program; None: the one that runs now. listen: where they reach this machine; what the launcher says when
    empty. Errors: GraphError; RunError for a host that cannot take part; DeadlineError with who came."""
    launch = launch or this_launch({})
    if launch is None:
        raise GraphError(
            "each host of a run builds its graph by itself, and nothing says which program it is: it has no file, as "
            "in a notebook; put it into a file with main(build), and start that"
        )
    with contextlib.ExitStack() as open_:
        keys = RunKeys.make()
        agents = Agents(listen or launcher.listen, keys, folder.path)
        open_.callback(launcher.stop)
        open_.callback(agents.close)
        agents.announce()
        launcher.start(Joining(
            address=agents.address, keys=keys.to_bytes(), keys_file=str(folder.path / KEYS_FILE), launch=launch,
            folder=str(folder.path),
        ))  # fmt: skip
        agents.watch = launcher.ended
        agents.gather(launcher.hosts, limits.start_s)
        yield Hosts(agents=agents, folder=folder, launch=launch, limits=limits, devices=tuple(agents.hosts))
