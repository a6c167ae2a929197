"""What the scheduler knows: one record of each worker, over all of its attempts, and what concerns
all workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import structs

from dataflow.folder.live_changes import KnobChange, Swap
from dataflow.graph import Graph
from dataflow.limits import Limits
from dataflow.planning.hosts import Host
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.scoring.failure import BY_CAUSE
from dataflow.system.messages import Life
from dataflow.worker.messages import Heartbeat, ToWorker, WeightLine

# Sums over the heartbeats of all attempts of one worker, as plain values for the display and the
# doctor.

_COUNTERS = (
    "tokens",
    "scored",
    "failed",
    "does_not_apply",
    "restarts",
    "turns",
    "played",
    "retried",
    "world_s",
)
"""The counts in a node's status that start at 0 in each process; all else in it is a state."""
_COUNTED = (BY_CAUSE, "decode_")
"""Prefixes of further such counts."""

ENDED = "was ended to"
"""How the cause begins of a worker that was ended on purpose, so that its next attempt is another,
or elsewhere."""

Told = Mapping[str, Any]
"""A heartbeat in plain values; empty where there was none."""


def together(earlier: Told, now: Heartbeat | None) -> Told:
    """A heartbeat whose sums are those of both; facts known only of earlier attempts stay."""
    nodes = dict(earlier.get("nodes", {}))
    for name, counts in nodes.items():
        nodes[name] = {**counts, "blocked": False, "starved": False, "ended": False, "turn": ""}
    if now is None:
        return {**earlier, "nodes": nodes}
    for name, report in now.nodes.items():
        plain = structs.asdict(report)
        nodes[name] = _added(nodes[name], plain) if name in nodes else plain
    return {
        **earlier,
        **structs.asdict(now),
        "nodes": nodes,
    } | {"crossed": {**earlier.get("crossed", {}), **now.crossed}}


def _added(before: Told, report: dict[str, Any]) -> dict[str, Any]:
    status = dict(report["status"])
    for key, count in before["status"].items():
        if key in _COUNTERS or key.startswith(_COUNTED):
            status[key] = status.get(key, 0) + count
    return report | {
        "status": status,
        "seconds": {
            key: value + before["seconds"].get(key, 0.0) for key, value in report["seconds"].items()
        },
        **{key: report[key] + before[key] for key in ("rows_in", "rows_out", "measured_s")},
    }


# What a scheduler knows of the operators that took the place of others in its run.


@dataclass(kw_only=True)
class Swaps:
    """The swaps that count, and the one that is being made."""

    made: list[Swap] = field(default_factory=list)
    """In order; whatever worker starts runs the last of each of its nodes. Of those before it only
    the one is kept that it took the place of."""
    worker: str = ""
    """The worker that is being replaced by one with the last swap; empty: none."""
    taken_back: str = ""
    """Why the last swap does not count any more, while that worker starts without it."""

    @property
    def following(self) -> int:
        """The number of the next one."""
        return 1 + max((swap.number for swap in self.made), default=0)


class ProcessState(StrEnum):
    """How far a worker's process is; `reducer` draws the transitions."""

    FORKED = "forked"
    """Asked for; it has not said hello."""
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"
    """It has failed or is being killed: of its messages only sums count."""
    DOWN = "down"
    """It has ended, and is started again at `restart_at`."""
    ENDING = "ending"
    """It has said bye."""
    GONE = "gone"


class Membership(StrEnum):
    """Of a worker in the graph, whatever becomes of its process; `scaling` says how it changes."""

    JOINING = "joining"
    LIVE = "live"
    LEAVING = "leaving"
    STOPPING = "stopping"
    LEFT = "left"


@dataclass(kw_only=True)
class SeenProcess:
    """What a scheduler sees of a worker's process; the next one learns it from the forkserver and
    from heartbeats.
    """

    has_process: bool = False
    pid: int = 0
    """0: it has not said hello."""
    forked_at: float = 0.0
    heard_at: float = 0.0
    """When its last message came."""
    dying_since: float = 0.0
    stopped_since: float | None = None
    """Since when it stands still, stopped by a signal (SIGSTOP)."""
    heartbeat: Heartbeat | None = None
    stacks: tuple[float, Sequence[Any]] | None = None
    """When it told where its threads are, and where."""
    is_reachable: bool = True
    """Whether it has found the socket of this scheduler: until then no message reaches it."""
    deferred: list[ToWorker] = field(default_factory=list)
    """Messages that it is sent as soon as it has."""


@dataclass(kw_only=True)
class WorkerRecord(SeenProcess):
    """One worker: the attempt under way, what those before it did, and its place among the
    others.
    """

    name: str
    worker: str
    """Its name, from the plan's name and its replica."""
    replica: int
    nodes: tuple[str, ...]
    host: str = ""
    """The host of the attempt under way, or of the next one; empty: this machine, where there is no
    other."""
    rank_hosts: tuple[str, ...] = ()
    """Hosts of the ranks of a trainer that is spread over several; `host` is the first one's."""
    gpus: tuple[int, ...] = ()
    process: ProcessState = ProcessState.FORKED
    membership: Membership = Membership.LIVE
    life: Life = Life()
    """Of the process under way, or of the last one."""

    machine: str = ""
    """On which its process has its number."""
    cause: str = ""
    """Why it is dying, or down."""
    lasting: bool = False
    """Whether a restart does not mend that."""
    earlier: Told = field(default_factory=dict)
    """Sums over the attempts before this one."""

    # Its restarts
    restart_at: float | None = None
    """When the next attempt starts; None: none is planned."""
    at_work_since: float | None = None
    """Whether the attempt is not the first."""
    delay_s: float = 0.0
    """Before the last restart."""

    # Its neighbours
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Addresses at which it receives, by edge, or at which the attempt before did."""
    received_at: str = ""
    """The host of these addresses."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """By edge, addresses of earlier attempts, if elsewhere."""
    lines: Mapping[str, WeightLine] = field(default_factory=dict)
    """The weight lines of its trainers, by name."""
    senders: set[str] = field(default_factory=set)
    """Workers that send to it, or have sent."""
    unconfirmed: dict[int, str] = field(default_factory=dict)
    """Tickets of messages about it, and who is to confirm them."""
    wired: bool = False
    """Whether it was told where to send, so that it can be told of changes."""
    may_miss_ends: bool = False
    """Whether it may not have heard every sender's end: the attempt that runs is not the first, or
    its leave was begun by an earlier scheduler, and a sender that never heard of it has none to
    tell."""
    drained: bool = False

    @property
    def is_live(self) -> bool:
        """Whether its messages count: neither waiting for a restart nor at its end."""
        return self.process not in (ProcessState.DOWN, ProcessState.GONE)

    @property
    def is_away(self) -> bool:
        """Whether it has been at work in this run, and is not now."""
        starts_again = self.life.attempt > 0 and self.process in (
            ProcessState.FORKED,
            ProcessState.STARTING,
        )
        return self.process in (ProcessState.DYING, ProcessState.DOWN) or starts_again

    @property
    def is_spread(self) -> bool:
        """Whether it has ranks on other hosts than its own."""
        return len(set(self.rank_hosts)) > 1

    def is_due(self, now: float) -> bool:
        """Whether its next attempt is to begin."""
        return self.restart_at is not None and self.restart_at <= now

    @property
    def may_end(self) -> bool:
        """Whether it was told to leave, so that its end is in order."""
        return self.membership in (Membership.STOPPING, Membership.LEFT)

    @property
    def may_wind_down(self) -> bool:
        """Whether it can wind down when it is told to stop."""
        return self.has_process and self.pid > 0 and self.process is not ProcessState.DYING

    @property
    def state(self) -> str:
        """Its state as text."""
        return str(self.membership if self.membership is Membership.LEFT else self.process)

    @property
    def told(self) -> Told:
        """The last heartbeat, with the sums of all attempts."""
        return together(self.earlier, self.heartbeat)

    @property
    def begun(self) -> int:
        """Rollouts that the attempt under way has begun and not sent on, as it told last."""
        reports = self.heartbeat.nodes.values() if self.heartbeat is not None else ()
        return sum(int(report.status.get("begun", 0)) for report in reports)

    @property
    def at(self) -> dict[str, str]:
        """As `Settings.at` has it: by edge, and by line and executor."""
        lines = {
            f"{name}.{by}": address
            for name, line in self.lines.items()
            for by, address in line.at.items()
        }
        return {**self.addresses, **lines}

    def fork(self, now: float, scheduler: int) -> None:
        """An attempt is requested, by the scheduler of this number, which its process finds."""
        self.life = Life(scheduler, self.life.attempt)
        self.process, self.forked_at, self.heard_at = ProcessState.FORKED, now, now
        self.cause, self.lasting, self.restart_at = "", False, None
        self.is_reachable, self.deferred = True, []

    def die(self, cause: str, now: float, *, lasting: bool = False) -> None:
        """It failed, or is being killed."""
        self.lasting |= lasting
        self.process, self.cause, self.dying_since = ProcessState.DYING, self.cause or cause, now

    def fall(self, cause: str) -> None:
        """The attempt under way has ended, and another one may follow."""
        self.earlier, self.heartbeat = self.told, None
        self.process, self.wired, self.pid, self.cause = ProcessState.DOWN, False, 0, cause

    def to_plain(self) -> dict[str, Any]:
        """What the next scheduler cannot learn from the forkserver or from heartbeats; for JSON."""
        plain = {name: getattr(self, name) for name in _REMEMBERED}
        plain |= {name: list(plain[name]) for name in _TUPLES}
        plain["lines"] = {name: structs.asdict(line) for name, line in self.lines.items()}
        return plain | {
            "senders": sorted(self.senders),
            "unconfirmed": list(self.unconfirmed.items()),
        }


_TUPLES = ("nodes", "gpus", "rank_hosts", "life")
_SEEN = {field_.name for field_ in fields(SeenProcess)}
_REMEMBERED = [field_.name for field_ in fields(WorkerRecord) if field_.name not in _SEEN]


@dataclass(kw_only=True)
class HostRecord:
    """One machine of the run, as its agent tells of it."""

    facts: Host
    is_alive: bool = True
    """Whether its agent is heard, so that its workers count and others may be started there."""
    heard_at: float = 0.0
    """When its agent last said anything."""
    cause: str = ""
    """What became of it when it was lost: what comes after its name in a sentence."""
    back_at: float = float("-inf")
    """When it came back after it was lost."""
    losses: list[float] = field(default_factory=list)
    """When it was lost, those times that may count, oldest first."""
    is_met: bool = True
    """Whether this scheduler knows the host's processes; after a takeover the agent tells them."""

    @property
    def name(self) -> str:
        """The host's."""
        return self.facts.name

    def to_plain(self) -> dict[str, Any]:
        """What the next scheduler takes up, for JSON."""
        return {
            "facts": asdict(self.facts),
            "is_alive": self.is_alive,
            "cause": self.cause,
            "losses": self.losses,
        }


@dataclass(frozen=True)
class Failure:
    """One attempt of one worker that came to its end."""

    worker: str
    attempt: int
    cause: str
    at: float


@dataclass(kw_only=True)
class Table:
    """All that the decisions of a scheduler rest on.

    Of another scheduler's clock only what is decided is kept (`to_plain`): both are the machine's.
    """

    graph: Graph
    plan: Plan
    limits: Limits = field(default_factory=Limits)
    folder: str = ""
    """Of the run."""
    scheduler: int = 0
    """Number of the one whose decisions these are."""
    run: RunStateMachine = field(init=False)
    workers: dict[str, WorkerRecord] = field(init=False)
    hosts: dict[str, HostRecord] = field(init=False)
    """By name, in the order of their accelerators' numbers; empty: this machine alone."""
    no_room_since: float | None = None
    """Since when some worker waits for a host with room for it."""
    edges: list[tuple[str, str, str]] = field(init=False)
    """Name, sending worker and receiving worker of each edge between two."""
    begun: bool = False
    """Whether all were ready once."""
    is_closing: bool = False
    """Whether all were told to stop."""
    watched_at: float = 0.0
    """When workers were last checked for hangs."""
    starts_until: float = 0.0
    joins_until: float = 0.0
    drains_until: float = 0.0

    wishes: dict[str, int] = field(default_factory=dict)
    """Replicas that nodes are to have, and do not have yet."""
    schedule: list[tuple[int, Mapping[str, int]]] = field(init=False)
    """Wishes of the plan, by the step from which they count."""
    notes: set[str] = field(default_factory=set)
    """Notices of workers that the user has seen."""
    last_ticket: int = 0
    swaps: Swaps = field(default_factory=Swaps)
    changes: list[KnobChange] = field(default_factory=list)
    """All knob changes, in order."""
    failures: list[Failure] = field(default_factory=list)
    """Failures that may count, oldest first."""
    made: int = 0
    """How far the run has come."""
    progressed_at: float = float("-inf")
    """When it last came further."""
    hopeless: str | None = None
    """Why the run must end; None while there is hope."""

    def __post_init__(self) -> None:
        self.run = RunStateMachine(self.graph, self.plan)
        self.schedule = sorted(self.plan.scale.items())
        worker = {node: placement.worker for node, placement in self.plan.placements.items()}
        self.edges = [
            (edge.name, worker[edge.producer], worker[edge.consumer])
            for edge in edges(self.graph)
            if worker[edge.producer] != worker[edge.consumer]
        ]
        self.hosts = {host.name: HostRecord(facts=host) for host in self.plan.devices.hosts}
        self.workers = {}
        for name, replica, nodes in self.plan.processes():
            placement = self.plan.placements[nodes[0]]
            self.add(
                WorkerRecord(
                    name=f"{name}-{replica}",
                    worker=name,
                    replica=replica,
                    nodes=tuple(nodes),
                    host=placement.host(replica),
                    rank_hosts=placement.rank_hosts,
                    gpus=placement.gpus_of(replica),
                )
            )
        replicas = self.by_worker()
        senders = {
            consumer: {
                record.name
                for _, producer, to in self.edges
                if to == consumer
                for record in replicas[producer]
            }
            for consumer in replicas
        }
        for record in self:
            record.senders = set(senders[record.worker])

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self.workers.values())

    def __reversed__(self) -> Iterator[WorkerRecord]:
        """The last first, which are started last: whoever waits for all looks there first."""
        return reversed(self.workers.values())

    def add(self, record: WorkerRecord) -> None:
        """One worker more."""
        self.workers[record.name] = record

    def by_worker(self) -> dict[str, list[WorkerRecord]]:
        """The replicas of each of the plan's workers."""
        records: dict[str, list[WorkerRecord]] = {}
        for record in self:
            records.setdefault(record.worker, []).append(record)
        return records

    def hosts_of(self, record: WorkerRecord) -> list[HostRecord]:
        """The hosts of a worker and its ranks; none: this machine, where there is no other."""
        return [
            self.hosts[name] for name in dict.fromkeys((record.host, *record.rank_hosts)) if name
        ]

    def is_met(self, record: WorkerRecord) -> bool:
        """Whether this scheduler knows what became of a worker's process."""
        return not record.host or self.hosts[record.host].is_met

    def upstream(self, record: WorkerRecord) -> set[str]:
        """The plan's workers that send to this one."""
        return {producer for _, producer, consumer in self.edges if consumer == record.worker}

    @property
    def joining(self) -> WorkerRecord | None:
        """The newcomer on its way."""
        return next((record for record in self if record.membership is Membership.JOINING), None)

    @property
    def is_ending(self) -> bool:
        """Whether the run is to make no further step."""
        return self.run.draining or self.run.over

    def all_ended(self, node: str) -> bool:
        """Whether every replica of a node says that its inputs have ended and it has nothing more
        to do.
        """
        reports = [
            record.heartbeat.nodes.get(node) if record.heartbeat else None
            for record in self
            if node in record.nodes
        ]
        return all(report is not None and report.ended for report in reports)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for the next scheduler, as JSON; only of a run that has begun."""
        return {
            "run": self.run.to_plain(),
            "workers": [record.to_plain() for record in self],
            "wishes": self.wishes,
            "schedule": self.schedule,
            "last_ticket": self.last_ticket,
            "made": self.made,
            "failures": [
                [failure.worker, failure.attempt, failure.cause, failure.at]
                for failure in self.failures
            ],
            "progressed_at": self.progressed_at if self.made else None,
            "hosts": [host.to_plain() for host in self.hosts.values()],
            "swaps": asdict(self.swaps),
            "changes": [asdict(change) for change in self.changes],
        }

    def take_up(self, plain: Mapping[str, Any]) -> None:
        """Continue from what `to_plain` of the scheduler before gave."""
        self.run.take_up(plain["run"])
        self.workers = {
            worker["name"]: msgspec.convert(
                {**worker, "unconfirmed": dict(worker["unconfirmed"])}, WorkerRecord
            )
            for worker in plain["workers"]
        }
        self.wishes, self.last_ticket = dict(plain["wishes"]), plain["last_ticket"]
        self.schedule = [(step, wishes) for step, wishes in plain["schedule"]]
        self.failures = [Failure(*failure) for failure in plain["failures"]]
        self.hosts = {
            host["facts"]["name"]: msgspec.convert(host, HostRecord) for host in plain["hosts"]
        }
        self.made, self.swaps = plain["made"], msgspec.convert(plain["swaps"], Swaps)
        self.changes = msgspec.convert(plain["changes"], list[KnobChange])
        self.progressed_at = (
            float("-inf") if plain["progressed_at"] is None else plain["progressed_at"]
        )
        self.begun = True

    def obituary(self, record: WorkerRecord) -> str:
        """What became of a needed worker, as text."""
        return (
            f"worker '{record.name}' ({', '.join(record.nodes)}) {record.cause} while the run"
            f" needed it; see {self.folder}/logs/{record.name}.log"
        )
