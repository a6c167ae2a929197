"""The hosts of a run: gathered by a launcher, or found with the workers of a scheduler that has
died.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from dataflow.agent.digest import built
from dataflow.agent.messages import Begin
from dataflow.agent.rendezvous import KEYS_FILE, FinalNotices, Rendezvous
from dataflow.errors import GraphError, Replaced, RunError
from dataflow.folder.copies.store import Copies
from dataflow.folder.ledger_service.service import LedgerProcess
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_hold import RunHold
from dataflow.folder.snapshot import read
from dataflow.graph import Graph
from dataflow.history.launch import Launch, this_launch
from dataflow.launchers.launcher import Joining, Launcher
from dataflow.limits import Limits
from dataflow.node import Generate
from dataflow.planning.hosts import Devices, Host, named
from dataflow.planning.inputs import PlanInputs
from dataflow.planning.plan import Plan
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control_server import HostsControlServer
from dataflow.scheduler.execute import Taken
from dataflow.scoring.joining import Join
from dataflow.structure import trainers
from dataflow.system.messages import Life
from dataflow.system.security import RunKeys, endpoint

# A run of which hosts do not see the scheduler's folder: what it cannot be, and what is told.


def check_own_folders(graph: Graph, plan: Plan, copies: Copies | None) -> None:
    """Refuse what cannot be where hosts have folders of their own. copies: of checkpoints. Errors:
    GraphError.
    """
    own = own_hosts(plan)
    if own and copies is None:
        raise GraphError(
            f"{_see_no_other(own)}, and there is no address from which another host could go on;"
            " give all hosts one folder (runs=), or an address for copies of checkpoints"
            " (--checkpoint-to)"
        )
    for worker, placement in plan.placements.items():
        if graph.operators[worker].trains and own.intersection(placement.rank_hosts):
            raise GraphError(
                f"the ranks of '{worker}' are spread over hosts {named(placement.rank_hosts)},"
                f" which write one checkpoint together, but {_see_no_other(own)}; give all of them"
                f" one folder (runs=), or '{worker}' a host that has room for all of its ranks"
            )
    joins = [name for name, operator in graph.operators.items() if isinstance(operator, Join)]
    drawn = {
        host
        for name, op in graph.operators.items()
        if isinstance(op, Generate)
        for host in _hosts(plan, name)
    }
    if joins and own & drawn:
        raise GraphError(
            f"'{joins[0]}' joins branches of one stream, but {_see_no_other(own & drawn)}: rollouts"
            " that are lost with such a host are drawn anew, and one branch could have the old"
            " ones and another the new; give these hosts and the scheduler one folder (runs=), or"
            " have all generators on hosts that see it"
        )


def told_of(graph: Graph, plan: Plan, path: str, copied_to: str) -> str:
    """What the user of such a run is told as it begins; empty where all hosts see the folder.
    copied_to: the address of copies.
    """
    own = own_hosts(plan)
    if not own:
        return ""
    trainer_hosts = {
        name: host for name in trainers(graph) for host in _hosts(plan, name) if host in own
    }
    notice = (
        f"{_see_no_other(own, path)}: what is made there stays at that path, on a disk of its own"
    )
    if not trainer_hosts:
        return notice
    stays = ", ".join(f"'{name}' stays on host '{host}'" for name, host in trainer_hosts.items())
    return f"{notice}; {stays}, and what is copied to {copied_to} survives the loss of that disk"


def own_hosts(plan: Plan) -> set[str]:
    """Those that do not see the scheduler's folder."""
    return {host.name for host in plan.devices.hosts if host.own_folder}


def _hosts(plan: Plan, node: str) -> tuple[str, ...]:
    """Where a node's worker is."""
    worker = next(worker for worker, nodes in plan.workers.items() if node in nodes)
    return plan.placements[plan.workers[worker][0]].all_hosts


def _see_no_other(hosts: Collection[str], path: str = "") -> str:
    names = f"host{'s' if len(hosts) > 1 else ''} {named(sorted(hosts))}"
    return (
        f"{names} {'do' if len(hosts) > 1 else 'does'} not see the scheduler's run"
        f" folder{path and f' {path}'}"
    )


FOUND_S = 6.0
"""For the agents of a scheduler that has died to come to this one: they look for it every two
seconds."""
_SHOWN = 8
"""Names of hosts."""
_ANYWHERE = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, kw_only=True)
class HostedRun:
    """A run that has its hosts."""

    plan: Plan
    server: HostsControlServer
    """Whose agents are ready."""
    taken: Taken | None
    """What a scheduler before has left, whose workers they have."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What is to run on hosts."""

    graph: Graph
    inputs: PlanInputs
    """Of the plan; the devices are those of the hosts that come."""
    make_plan: Callable[[PlanInputs], Plan]
    launch: Launch
    folder: RunFolder
    listen: str
    """Address of this machine that the hosts reach."""
    limits: Limits
    hold: RunHold
    """The run in the hands of this process."""
    ledger: LedgerProcess
    """To serve the run's ledger to all hosts."""
    part: int
    """How often the run was taken up before, this time included; 0: it is new."""
    copies: Copies | None
    """Where copies of checkpoints go."""
    may_take: Callable[[Plan], bool]
    """Whether workers that were left may go on as this plan has them."""
    told: Callable[[str], object]
    """Hears what the run waits for."""

    def server(self, agents: Agents, first: Life | None) -> HostsControlServer:
        """That of a scheduler whose workers are theirs. first: as `RequestHandler` has it. Errors:
        RunError.
        """
        address = self.ledger.serve(self.folder.ledger, endpoint(agents.host), agents.keys, first)
        return HostsControlServer(agents, self.folder.path, address, self.check)

    def check(self) -> None:
        """Whether this is still the one that leads the run, and its ledger can be had. Errors:
        Replaced; RunError.
        """
        self.hold.check()
        self.ledger.check()

    def check_folders(self, plan: Plan) -> None:
        """See that the run can be where hosts do not see its folder, and say what that means.
        Errors: GraphError.
        """
        check_own_folders(self.graph, plan, self.copies)
        if self.copies and (
            notice := told_of(self.graph, plan, str(self.folder.path), self.copies.place)
        ):
            self.told(notice)

    def plan(self, hosts: tuple[Host, ...]) -> tuple[Plan, PlanInputs]:
        """Over some hosts, and from what it was made. Errors: GraphError."""
        inputs = replace(
            self.inputs, devices=Devices.of(hosts, self.inputs.devices.link_bytes_per_s), listen=""
        )
        return self.make_plan(inputs), inputs


def program_of(launch: Launch | None) -> Launch:
    """The program that each host is to run: as given, or the one that runs now. Errors: GraphError
    where none can be named.
    """
    program = launch or this_launch()
    if program is None:
        raise GraphError(
            "each host of a run builds its graph by itself, and nothing says of which program: this"
            " one has no file, as in a notebook; put it into a file with main(build), and start"
            " that"
        )
    return program


def check_hosted(listen: str, *, standby: bool) -> None:
    """Refuse what a run over hosts cannot have. Errors: GraphError."""
    if standby:
        raise GraphError(
            "a run over hosts has no standby of its scheduler, but standby=True was given; leave it"
            " out: should the scheduler die, dataflow resume takes its workers over, from any host"
            " that sees the run folder"
        )
    if listen in _ANYWHERE:
        raise GraphError(
            f"the hosts of a run have to reach its scheduler, but listen={listen!r} is no address"
            " that they could connect to; give one that this machine has in their network"
        )


@contextlib.contextmanager
def hosted(launcher: Launcher, request: RunRequest) -> Iterator[HostedRun]:
    """A run on its hosts, for as long as the block lasts: those of a scheduler that has died, where
    they are still there and may go on; else as many as the launcher starts. Errors: GraphError;
    RunError; DeadlineError.
    """
    with contextlib.ExitStack() as open_:
        if (hosted_run := _left(request)) is not None:
            open_.callback(hosted_run.server.close)
            yield hosted_run
            return
        yield _gathered(launcher, request, open_)


def _told_once(by_launcher: list[str], by_agents: list[str]) -> list[str]:
    """A launcher may have read what an agent has said."""
    return by_launcher + [
        said for said in by_agents if not any(said in told for told in by_launcher)
    ]


def _named(hosts: Sequence[str]) -> str:
    """Some names, of very many the first and the last."""
    return (
        ", ".join(hosts)
        if len(hosts) <= _SHOWN
        else f"{hosts[0]} to {hosts[-1]} ({len(hosts)} hosts)"
    )


def _left(request: RunRequest) -> HostedRun | None:
    """With the workers that a scheduler has left; None: there are none, or those were ended, as
    they may not go on.
    """
    folder = request.folder.path
    at, keys = Rendezvous.read(folder), Rendezvous.keys(folder)
    if at is None or keys is None or not at.hosts:
        return None
    hosts = at.hosts
    agents = Agents(request.listen, keys, folder, request.hold.number, hang_s=request.limits.hang_s)
    server = request.server(agents, None)
    agents.announce(hosts)
    plan, ours, begin = (
        None,
        None,
        Begin(launch={}, inputs={}, whereabouts=asdict(server.whereabouts)),
    )
    with contextlib.suppress(GraphError, RunError):
        plan, inputs = request.plan(hosts)
        ours, begin = built(request.graph, plan, request.launch), _begin(request, inputs, server)
    came = server.take_over(begin, ours, [host.name for host in hosts], FOUND_S)
    with contextlib.suppress(GraphError, RunError):
        all_can = not any(host.own_folder for host in hosts)  # others do not find this scheduler
        if (
            came
            and all_can
            and plan
            and ours
            and request.may_take(plan)
            and agents.digests <= {ours.digest, ""}
        ):
            taken = Taken(server=server, snapshot=read(server.left))
            return HostedRun(plan=plan, server=server, taken=taken)
    server.close()
    return None


def _gathered(launcher: Launcher, request: RunRequest, open_: contextlib.ExitStack) -> HostedRun:
    """With as many hosts as the launcher starts; what was started ends with `open_`."""
    keys, folder = RunKeys.make(), request.folder.path
    agents = Agents(request.listen, keys, folder, request.hold.number, hang_s=request.limits.hang_s)

    def stop(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Replaced):
            launcher.stop()

    open_.push(stop)
    open_.callback(agents.close)
    agents.announce()
    notices = FinalNotices(folder)
    launcher.start(
        Joining(
            address=agents.address,
            keys=keys.to_bytes(),
            keys_file=str(folder / KEYS_FILE),
            launch=request.launch,
            folder=str(folder),
        )
    )
    agents.watch = lambda: _told_once(launcher.ended(), notices.new())
    count = launcher.hosts
    request.told(f"waiting for {count} host{'s' if count > 1 else ''} at {agents.address}")
    agents.assemble(count, request.limits.start_s)
    hosts = tuple(agents.hosts)
    plan, inputs = request.plan(hosts)
    request.check_folders(plan)
    request.told(f"{_named([host.name for host in hosts])} came: each builds the graph")
    agents.announce(hosts)
    server = request.server(agents, Life(request.hold.number))
    open_.callback(server.close)
    agents.build(
        _begin(request, inputs, server),
        built(request.graph, plan, request.launch),
        request.limits.start_s,
    )
    return HostedRun(plan=plan, server=server, taken=None)


def _begin(request: RunRequest, inputs: PlanInputs, server: HostsControlServer) -> Begin:
    """What a host is to build."""
    return Begin(
        launch=vars(request.launch),
        inputs=msgspec.to_builtins(inputs),
        whereabouts=asdict(server.whereabouts),
        part=request.part,
    )
