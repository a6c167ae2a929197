"""Which worker runs what, on which devices: a pure function of graph and devices."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from dataflow.check import check, too_large_groups
from dataflow.draw.picture import DeviceFrame
from dataflow.errors import GraphError, nearest
from dataflow.node import Generate, Learn, Source
from dataflow.planning.executors import (
    COLLECTIVE,
    WeightPath,
    copies_of,
    executor_between,
    explain,
    is_zero_copy,
    slow,
    summary,
    weight_paths,
)
from dataflow.planning.gpu_groups import (
    Group,
    Wishes,
    awake_at_once,
    check_replicas,
    check_scaled,
    count_gpus,
    groups_of,
    ranks_of,
    read_wishes,
)
from dataflow.planning.gpu_groups import explain as explain_turns
from dataflow.planning.hosts import Devices, named
from dataflow.planning.inputs import Place, digest, read_place
from dataflow.planning.main_memory import main_memory_needs
from dataflow.planning.memory_need import (
    SPARE,
    by_way,
    check_fit,
    first_way,
    need_of,
    rollouts_of,
)
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import (
    Need,
    Placement,
    Spot,
    amount,
    host_lines,
    spread_line,
    table,
)
from dataflow.planning.placing import needs_of, neighbours_of, placed, workers_of
from dataflow.planning.seats import Fixed, NodeNeeds, Replica, Seat, settle
from dataflow.records import MESSAGE_BYTES, message_fault
from dataflow.staleness import Bound, capacity
from dataflow.structure import Structure, drawn_by, sinks_of, sources_of
from dataflow.system.rank_places import Spreads

# Ports on which workers listen: on each host one worker has one.


def check_ports(placements: Mapping[str, Placement]) -> None:
    """Refuse two workers that would listen on one port of one host. GraphError."""
    listeners: dict[tuple[str, int], str] = {}
    for placement in placements.values():
        for replica in range(placement.replicas if placement.port else 0):
            name = (
                f"'{placement.node}'"
                if placement.replicas == 1
                else f"'{placement.node}-{replica}'"
            )
            listener = listeners.setdefault((placement.host(replica), placement.port), name)
            if listener != name:
                place = (
                    f"host '{placement.host(replica)}'"
                    if placement.host(replica)
                    else "this machine"
                )
                raise GraphError(
                    f"{listener} and {name} would both listen on port {placement.port} of {place},"
                    " where"
                    " only one can; give port=0 (any that is free), or each operator a port of its"
                    " own, and replicas with one port hosts of their own with place="
                )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements in the graph's order, and what the workers need to know of the graph as a whole.

    >>> from dataflow import Devices, Graph, plan
    >>> from dataflow.testing import FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(g.source(FakePrompts()))
    >>> made = plan(g, Devices(cpus=4))
    >>> made.placements["trainer"].devices
    'cpu, 4 threads'
    """

    placements: Mapping[str, Placement]
    bounds: Mapping[str, Bound]
    """Sources that lead to a trainer with feedback."""
    on_demand: tuple[str, ...]
    """Sources that issue only when the control asks for an evaluation."""
    devices: Devices = field(default_factory=lambda: Devices(cpus=1))
    weight_paths: tuple[WeightPath, ...] = ()
    """Every replica that reads weights, and how they get to it."""
    weights: str | None = None
    """The executor that the user names; None: one is chosen for each replica."""
    scale: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """From which step on how many replicas a node is to have."""
    turns: tuple[Group, ...] = ()
    """Nodes that share their devices, of which one is awake at a time."""
    copying: tuple[str, ...] = ()
    """Trainers that send versions from copies of their weights wherever they could send these."""
    neighbours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By worker of light operators, those that exchange rows with it, which it is to sit beside."""
    listen: str = ""
    """Address of this machine at which the run listens; empty: only sockets within it."""
    message_bytes: int = MESSAGE_BYTES
    """Most bytes of one message on a data edge: batches are cut, a single group above it goes in
    parts."""

    def executor(
        self, trainer: str, reader: str, replica: int, *, apart: bool | None = None
    ) -> str:
        """How weights get from a trainer to a replica; a newcomer's are those of the last replica
        that the plan knows.

        apart: whether they are on two hosts now, where one of them may have moved; None: they are
        where they were planned.
        """
        planned_replica = min(replica, self.placements[reader].replicas - 1)
        if apart is None or self.weights is not None:
            return self._executors[trainer, reader, planned_replica]
        return executor_between(
            self.placements[trainer], self.placements[reader], planned_replica, apart=apart
        )

    @cached_property
    def _executors(self) -> dict[tuple[str, str, int], str]:
        """By trainer, reader and replica."""
        return {
            (path.trainer, path.reader, path.replica): path.executor for path in self.weight_paths
        }

    def link(self, trainer: str, executor: str) -> float | None:
        """Bytes per second of the slow links by which an executor carries a trainer's weights;
        None: of fast ones.

        Over hosts all links between two are such, whoever is on which of them now.
        """
        if self.devices.hosts and executor in COLLECTIVE:
            return slow(self.devices.link_bytes_per_s)
        rates = [
            path.link_bytes_per_s
            for path in self.weight_paths
            if (path.trainer, path.executor) == (trainer, executor)
            and path.link_bytes_per_s is not None
        ]
        return min(rates, default=None)

    def zero_copy(self, trainer: str, executor: str) -> bool:
        """Whether an executor sends a trainer's versions from its weights themselves, which wait
        for readers then.
        """
        link = self.link(trainer, executor)
        return is_zero_copy(
            self.placements[trainer],
            executor,
            link_bytes_per_s=link,
            copies=trainer in self.copying,
        )

    def executors(self) -> dict[tuple[str, str], str]:
        """By (trainer, reader): how weights get from one to the other."""
        pairs: dict[tuple[str, str], list[WeightPath]] = {}
        for path in self.weight_paths:
            pairs.setdefault((path.trainer, path.reader), []).append(path)
        return {pair: summary(paths) for pair, paths in pairs.items()}

    @property
    def workers(self) -> dict[str, list[str]]:
        """Nodes by worker; the replicas of a node are workers of their own."""
        workers: dict[str, list[str]] = {}
        for node, placement in self.placements.items():
            workers.setdefault(placement.worker, []).append(node)
        return workers

    def turns_of(self, node: str) -> Group:
        """The nodes that it takes turns with, itself among them; none where its devices are its
        own.
        """
        return next((group for group in self.turns if node in group), ())

    def processes(self) -> list[tuple[str, int, list[str]]]:
        """Every process to start: (worker, replica, nodes)."""
        return [
            (worker, replica, nodes)
            for worker, nodes in self.workers.items()
            for replica in range(self.placements[nodes[0]].replicas)
        ]

    def host(self, worker: str, replica: int) -> str:
        """The host of a process; empty: this machine."""
        return self.placements[self.workers[worker][0]].host(replica)

    def settle(
        self, devices: Devices, wanted: Iterable[Replica], fixed: Fixed
    ) -> tuple[dict[Replica, Seat], dict[str, str]]:
        """Seats for some replicas while a run of this plan goes on, as `seats.settle` has them.

        devices: those of the plan, and hosts that joined since behind them.
        """
        needs = {
            node: needs_of(placement)
            for node, placement in self.placements.items()
            if placement.worker not in self.neighbours
        }
        return settle(needs, devices, self.turns, self.neighbours, wanted, fixed)

    def digest(self) -> str:
        """The digest of the plan: equal where two processes have made the same plan."""
        return digest(self)

    def frames(self) -> list[DeviceFrame]:
        """Device groups, for the picture."""
        groups: dict[tuple[str, str], list[str]] = {}
        for node, placement in self.placements.items():
            label = f"{placement.worker} · {placement.devices}"
            label += f" · {placement.replicas} replicas" if placement.replicas > 1 else ""
            label += f" · {placement.mesh}" if placement.mesh else ""
            mates = [name for name in self.turns_of(node) if name != node]
            label += f" · in turn with {', '.join(mates)}" if mates else ""
            hosts = placement.all_hosts
            where = f"host{'s' if len(hosts) > 1 else ''} {named(hosts)}" if hosts else ""
            groups.setdefault((label, where), []).append(node)
        return [
            DeviceFrame(label=label, nodes=tuple(nodes), where=where)
            for (label, where), nodes in groups.items()
        ]

    def _caches(self) -> Iterator[str]:
        """What caches take that take what is free."""
        room = self.devices.gpu_memory_bytes
        for placement in self.placements.values():
            need = placement.need
            if need is not None and need.rollout and room:
                nbytes, count = rollouts_of(need, room)
                yield (
                    f"the KV-cache of each rank of '{placement.node}' takes what is left:"
                    f" {amount(nbytes)}, {count} rollouts of full length at once"
                )

    def explain(self) -> str:
        """The plan as a table."""
        rows = [["node", "worker", "replicas", "ranks", "devices", "memory"]]
        for p in self.placements.values():
            cells = [p.node, p.worker, str(p.replicas), str(p.ranks), p.devices]
            rows.append([*cells, amount(p.memory_bytes)])
        if self.devices.hosts:
            hosts = ["hosts", *(named(p.all_hosts) for p in self.placements.values())]
            rows = [[*row, cell] for row, cell in zip(rows, hosts, strict=True)]
        lines = table(rows, ruled=True)
        lines += host_lines(self.devices, self.placements.values(), self.neighbours)
        for source, bound in self.bounds.items():
            lines.append(
                f"rows of '{source}' run at most {bound.max_staleness} versions ahead: "
                f"{capacity(bound.prompts_per_step, bound.max_staleness)} prompts in flight"
            )
        lines += [
            f"the ranks of '{placement.node}' are {placement.mesh}"
            for placement in self.placements.values()
            if placement.mesh
        ]
        lines += [
            line for placement in self.placements.values() if (line := spread_line(placement))
        ]
        lines.append(
            f"a message on a data edge has at most {amount(self.message_bytes)}; a larger group"
            " goes in parts"
        )
        lines += [
            f"each process of '{placement.node}' needs at least {placement.need}"
            for placement in self.placements.values()
            if placement.need is not None
        ]
        lines += [*self._caches()]
        lines += [
            f"left to the plan, '{placement.node}' has {placement.choice}: the fastest way that"
            f" leaves {1 - SPARE:.0%} of a device free, as far as its size is known, else the least"
            for placement in self.placements.values()
            if placement.chosen
        ]
        lines += explain(self.weight_paths)
        lines += [*explain_turns(self.turns, self.placements)]
        if self.devices.hosts:
            lines.append(
                "edges and control go over tcp between hosts, encrypted, for holders of this run's"
                " keys alone; weights between hosts go by gloo and nccl, not encrypted"
            )
        elif self.listen:
            lines.append(
                f"edges and control listen at {self.listen}, encrypted, for holders of this run's"
                " keys alone; commands and weights stay on this machine (gloo and nccl on"
                " loopback, not encrypted)"
            )
        for step, wishes in sorted(self.scale.items()):
            for node, count in wishes.items():
                lines.append(
                    f"from step {step} on '{node}' has {count} replica{'s' if count > 1 else ''}; "
                    f"each that joins gets {self.placements[node].share}"
                )
        return "\n".join(lines)


def plan(
    graph: Structure,
    devices: Devices,
    *,
    gpus: Wishes | Literal["shared"] | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    steps: int | None = None,
    sizes: Mapping[str, ModelSize] | None = None,
    scale: Mapping[int, Mapping[str, int]] | None = None,
    weights: str | None = None,
    message_bytes: int = MESSAGE_BYTES,
    place: Place | None = None,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
    one_process: bool = False,
) -> Plan:
    """Map the graph onto devices.

    Args:
        gpus: accelerators by node, or the name of the node whose devices it shares (main memory,
            where that node has no accelerator): they take turns. "shared": all nodes that compute
            share all devices.
        replicas: copies of a node that runs on CPU (accelerators count replicas by themselves).
        ranks: processes that share out the model of a trainer that runs on CPU (accelerators count
            them by themselves).
        scale: copies of a node from a step of the trainers on.
        weights: the executor of the weight plane; None: chosen for each reader.
        message_bytes: most bytes of one message on a data edge; a larger group goes in parts.
        place: by node, the host of its replicas, or several that they take in turn, or that the
            ranks of a trainer are spread over; others are placed as `seats` says.
        chosen: by node, knobs that an earlier plan chose and the run keeps (`Placement.chosen`);
            None: they are chosen now, by what fits.
        one_process: all operators run in one.

    Raises GraphError for unknown nodes and hosts, for more devices than there are, for ranks that
    cannot share a model out or find no host that has room for all of them, for an executor that
    cannot serve, and for groups that an edge could never hold.

    >>> from dataflow import Devices, Graph, Model, plan
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g, model = Graph("tiny"), Model("policies/tiny")
    >>> generator = FakeGenerator(model=model)
    >>> trainer = FakeTrainer(model=model, prompts_per_step=2)
    >>> trainer(generator(g.source(FakePrompts())))
    >>> g.feedback(trainer.weights, generator, max_staleness=1)
    >>> print(plan(g, Devices(cpus=4)).explain())  # doctest: +ELLIPSIS
    node       worker     replicas  ranks  devices         memory
    ---------  ---------  --------  -----  --------------  ------
    prompts    prompts    1         1      cpu, 1 thread   -
    generator  generator  1         1      cpu, 2 threads  -
    trainer    trainer    1         1      cpu, 2 threads  -
    rows of 'prompts' run at most 1 versions ahead: 4 prompts in flight
    ...
    """
    check(graph)
    if one_process and devices.hosts:
        raise GraphError(
            f"a run in one process has one machine, but is to be planned over {len(devices.hosts)}"
            " hosts; run it in processes, or leave hosts out"
        )
    if fault := message_fault(message_bytes):
        raise GraphError(fault)
    gpus = read_wishes(graph, gpus, devices.gpus)
    replicas, ranks, sizes, scale, place = (
        replicas or {},
        ranks or {},
        sizes or {},
        scale or {},
        place or {},
    )
    for name in [
        *gpus,
        *replicas,
        *ranks,
        *place,
        *(name for wishes in scale.values() for name in wishes),
    ]:
        if name not in graph.operators:
            raise GraphError(
                f"devices are given to '{name}', but the graph has {list(graph.operators)}"
                f"{nearest(name, graph.operators)}; name one of these"
            )
    counts, turns = count_gpus(gpus, devices), groups_of(graph, gpus)
    neighbours = neighbours_of(graph, workers_of(graph))

    def placed_in(room: int) -> dict[str, Placement]:
        """Where nodes are whose knobs are chosen by so much memory of an accelerator."""
        parts = _parts(graph, counts, replicas, ranks, sizes, one_process, turns, room, chosen)
        placements = placed(graph, parts, devices, turns, read_place(place, devices), neighbours)
        check_ports(placements)
        aside = main_memory_needs(graph, placements, turns, sizes)
        check_fit([*_needs(placements, turns), *aside], devices.room)
        return placements

    rooms = {host.gpu_memory_bytes for host in devices.machines if host.gpus} or {0}
    *larger, least = sorted(rooms, reverse=True)
    placements = None
    for room in larger:
        with contextlib.suppress(GraphError):
            placements = placements or placed_in(room)
    placements = placements or placed_in(least)
    made_plan = Plan(
        placements=placements,
        bounds=bounds_of(graph, steps),
        on_demand=_on_demand(graph),
        devices=devices,
        scale=scale,
        weights=weights,
        weight_paths=weight_paths(
            graph,
            placements,
            sizes,
            forced=weights,
            one_process=one_process,
            devices=devices,
            turns=turns,
        ),
        copying=tuple(
            name
            for name in {feedback.weights.trainer.name: None for feedback in graph.feedbacks}
            if copies_of(graph, name, turns, None)
        ),
        message_bytes=message_bytes,
        turns=turns,
        neighbours=neighbours,
    )
    for fault in too_large_groups(
        graph, {name: placement.replicas for name, placement in placements.items()}
    ):
        raise GraphError(fault)
    _check_scale(graph, made_plan, one_process)
    return made_plan


def _parts(
    graph: Structure,
    gpus: Mapping[str, int],
    replicas: Mapping[str, int],
    ranks: Mapping[str, int],
    sizes: Mapping[str, ModelSize],
    one_process: bool,
    turns: Sequence[Group],
    room: int,
    chosen: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, NodeNeeds]:
    """How often each node runs, as how many ranks, and what each needs."""
    parts: dict[str, NodeNeeds] = {}
    for name, operator in graph.operators.items():
        if not operator.computes and name in gpus:
            raise GraphError(
                f"'{name}' is given {gpus[name]} GPUs, but it uses no device; leave it out"
            )
    shares = {
        name: ranks_of(operator, gpus.get(name, 0), ranks.get(name), one_process)
        for name, operator in graph.operators.items()
    }
    trainers = {feedback.reader.name: feedback.weights.trainer.name for feedback in graph.feedbacks}
    for name, operator in graph.operators.items():
        model, ranks_each = operator.uses, shares[name]
        count = gpus[name] // ranks_each if name in gpus else replicas.get(name, 1)
        check_replicas(operator, count)
        needs = partial(
            need_of,
            graph,
            size=sizes.get(model.source) if model else None,
            ranks=ranks_each,
            on_gpu=name in gpus,
            in_turn=any(name in group for group in turns),
            trainer_ranks=shares.get(trainers.get(name, ""), 1),
        )
        knobs: Mapping[str, Any] = {}
        if name in gpus and chosen is None:
            knobs = first_way(operator, needs, room)
        elif chosen is not None:
            knobs = chosen.get(name, {})
        settled = by_way(operator, knobs)
        need = needs(settled)
        parts[name] = NodeNeeds(
            replicas=count,
            ranks=ranks_each,
            gpus=gpus.get(name, 0),
            need=need,
            may_spread=isinstance(operator, Spreads) and count == 1 and name not in trainers,
            split=operator.traits.split,
            port=operator.traits.port,
            chosen=knobs,
            arrives_in_host=name in gpus and settled.traits.arrives_in_host,
        )
    return {name: parts[name] for name in dict.fromkeys([*gpus, *parts])}


def _needs(
    placements: Mapping[str, Placement], turns: Sequence[Group]
) -> list[tuple[str, Spot, Need]]:
    """The needs of every rank that may be awake where memory is scarcest."""
    return awake_at_once(
        turns,
        [
            (
                f"{placement.worker}-{replica}" + (f".{rank}" if placement.ranks > 1 else ""),
                placement.node,
                (placement.host(replica, rank), placement.device(replica, rank)),
                placement.need,
            )
            for placement in placements.values()
            if placement.need is not None
            for replica in range(placement.replicas)
            for rank in range(placement.ranks)
        ],
    )


def _check_scale(graph: Structure, plan: Plan, one_process: bool) -> None:
    for step, wishes in plan.scale.items():
        if step < 0:
            raise GraphError(
                f"scale names step {step}; steps count from 0, before the first; name one of them"
            )
        for name, count in wishes.items():
            check_scaled(graph.operators[name], count, plan.placements[name].replicas)
    if one_process and plan.scale:
        raise GraphError(
            f"a run in one process has one replica of everything, but scale is {dict(plan.scale)}; "
            "leave it out, or run in processes"
        )


def bounds_of(graph: Structure, steps: int | None = None) -> dict[str, Bound]:
    """By source that leads to a trainer with feedback to its generator: how far generation may run
    ahead.
    """
    bounds: dict[str, Bound] = {}
    for feedback in graph.feedbacks:
        trainer = feedback.weights.trainer
        if not isinstance(trainer, Learn) or not isinstance(feedback.reader, Generate):
            continue
        for source in sources_of(graph, trainer.name):
            if source in drawn_by(graph, feedback.reader.name):
                bound = [bounds[source].max_staleness] if source in bounds else []
                tightest = min([feedback.max_staleness, *bound])
                bounds[source] = Bound(
                    max_staleness=tightest, prompts_per_step=trainer.step_prompts, steps=steps
                )
    return bounds


def _on_demand(graph: Structure) -> tuple[str, ...]:
    return tuple(
        name
        for name, operator in graph.operators.items()
        if isinstance(operator, Source)
        and any(sink.traits.every_steps for sink in sinks_of(graph, name))
    )
