"""`--foresee`: devices and a workload as text, what is foreseen of a graph as text."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError
from dataflow.foresight.calibration import calibrate, read_constants
from dataflow.foresight.catalogue import device_kind, kind_named
from dataflow.foresight.choice.candidates import Candidate, candidates
from dataflow.foresight.choice.gains import gains
from dataflow.foresight.choice.gains import told as told_gains
from dataflow.foresight.choice.search import Objective, choose, foreseen_of, ways
from dataflow.foresight.choice.search import to_plain as to_plain_choice
from dataflow.foresight.choice.ways_out import advised, plan_or_advise, roomy
from dataflow.foresight.counts import size_of
from dataflow.foresight.foresee import foresee, ground_of
from dataflow.foresight.rates import Constants
from dataflow.foresight.report import lines, picture, to_plain
from dataflow.foresight.seen import look
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.workload import PROMPT_TOKENS, Workload, read_workload
from dataflow.graph import Graph
from dataflow.planning.gpu_groups import Wishes, read_wishes
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.inputs import Place
from dataflow.planning.memory_need import DoesNotFit
from dataflow.planning.model_size import ModelSize
from dataflow.planning.plan import Plan
from dataflow.planning.this_machine import this_machine
from dataflow.structure import Structure
from dataflow.system.files import write_atomically
from dataflow.system.gpu_memory import gpu_names

# Devices that one could rent, and what one pays for them, as text: `192xH100+64xL40S`,
# `H100=2.5,L40S=1.0`.

_CORES_EACH, _MEMORY_EACH = 12, 128 * 10**9
"""Cores and bytes of main memory beside each device: assumed, about what nodes of eight have."""


def read_devices(text: str) -> Devices:
    """Nodes of eight of one kind, the last one with what is left; `2xcpu`: two cores of this
    machine, and nothing else.

    GraphError for what cannot be read.

    >>> from dataflow.foresight.command import read_devices
    >>> [(host.name, host.gpus) for host in read_devices("10xH100").hosts]
    [('H100-0', 8), ('H100-1', 2)]
    """
    if (cores := re.fullmatch(r"\s*([1-9][0-9]{0,3})\s*x\s*(?i:cpu)\s*", text)) is not None:
        return Devices(cpus=int(cores[1]))
    hosts: list[Host] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*x\s*([\w-]+)\s*", part)
        if match is None:
            raise GraphError(
                f"devices to foresee are {text!r}, which cannot be read at {part!r}; write them as"
                " 16xH100, or as 192xH100+64xL40S"
            )
        count, kind = int(match[1]), device_kind(match[2])
        if kind.name == "cpu":
            raise GraphError(
                f"devices to foresee are {text!r}; name either accelerators or cores, not both"
            )
        if any(host.kind == kind.name for host in hosts):
            raise GraphError(
                f"devices to foresee are {text!r}, which names {kind.name} twice; add the"
                " numbers up"
            )
        for number in range(-(-count // kind.per_node)):
            gpus = min(kind.per_node, count - number * kind.per_node)
            hosts.append(
                Host(
                    name=f"{kind.name}-{number}",
                    cpus=_CORES_EACH * gpus,
                    gpus=gpus,
                    kind=kind.name,
                    memory_bytes=_MEMORY_EACH * gpus,
                    gpu_memory_bytes=kind.memory_bytes,
                )
            )
    return Devices.of(hosts)


def read_prices(text: str, devices: Devices) -> Mapping[str, float] | None:
    """Of a device for an hour, by kind; None where nobody says. In whatever money they are given.

    GraphError for what cannot be read, and where a kind of these devices has none.

    >>> read_prices("H100=2.5,L40S=1.0", read_devices("8xH100"))
    {'H100': 2.5, 'L40S': 1.0}
    """
    if not text.strip():
        return None
    if not devices.gpus:
        raise GraphError(
            f"prices are {text!r}, but the devices are cores of this machine, which nobody rents by"
            " the hour here; leave --prices out, or foresee accelerators, as 16xH100"
        )
    by_kind: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([\w-]+)\s*=\s*([0-9]+(?:\.[0-9]+)?)\s*", part)
        if match is None:
            raise GraphError(
                f"prices are {text!r}, which cannot be read at {part!r}; write them as"
                " H100=2.5,L40S=1.0"
            )
        by_kind[device_kind(match[1]).name] = float(match[2])
    lacking = [
        kind for kind in dict.fromkeys(host.kind for host in devices.hosts) if kind not in by_kind
    ]
    if lacking:
        raise GraphError(
            f"prices are {text!r}, which has none for {', '.join(lacking)}; add {lacking[0]}=.."
        )
    return by_kind


AUTO = ("auto", "auto:cost")
"""Words of `--gpus` that leave it to a search: for the shortest step, for the least cost."""


def foreseen_of_run(
    graph: Structure,
    plan: Plan,
    workload: str,
    constants: str,
    *,
    steps: int | None,
    names: Callable[[], Sequence[str]] = gpu_names,
) -> dict[str, Any]:
    """What a run that is about to begin on this machine will take, for its folder.

    names: what its accelerators are called. GraphError as `foresee`, and for accelerators of no
    known kind.
    """
    placements = plan.placements.items()
    gpus: dict[str, int | str] = {
        name: len(placement.gpus) for name, placement in placements if placement.gpus
    }
    replicas = {
        name: placement.replicas
        for name, placement in placements
        if placement.replicas > 1 and name not in gpus
    }
    ranks = {
        name: placement.ranks
        for name, placement in placements
        if placement.ranks > 1 and name not in gpus
    }
    for first, *sharers in plan.turns:
        gpus |= dict.fromkeys(sharers, first)
    return to_plain(
        foresee(
            graph,
            here(plan.devices, names()) if gpus else Devices(cpus=plan.devices.cpus),
            gpus=gpus or None,
            replicas=replicas,
            ranks=ranks,
            workload=read_workload(workload),
            steps=steps,
            constants=read_constants(constants),
        )
    )


def here(devices: Devices, names: Sequence[str]) -> Devices:
    """This machine with the kind of its accelerators. names: theirs. GraphError where nobody knows
    it.
    """
    if not names:
        raise GraphError(
            "a run is foreseen on accelerators whose kind is known, but NVIDIA's management library"
            " tells none of this machine's; ask with --foresee 8xH100, say, or run without"
            " --constants"
        )
    kinds = dict.fromkeys(kind_named(name).name for name in names)
    if len(kinds) > 1:
        raise GraphError(
            "a run is foreseen on accelerators of one kind in each machine, but this one has"
            f" {' and '.join(kinds)}; ask with --foresee 4x{next(iter(kinds))}, say, or run without"
            " --constants"
        )
    kind = device_kind(next(iter(kinds)))
    host = Host(
        name="here",
        cpus=devices.cpus,
        gpus=devices.gpus,
        kind=kind.name,
        memory_bytes=devices.memory_bytes,
        gpu_memory_bytes=devices.gpu_memory_bytes or kind.memory_bytes,
    )
    return Devices.of([host], devices.link_bytes_per_s)


def told(
    graph: Graph,
    devices: str,
    *,
    gpus: Wishes | str | None,
    workload: str,
    steps: int | None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    constants: str = CONSTANTS[0],
    prices: str = "",
    draw: Path | None = None,
    place: Place | None = None,
) -> str:
    """What a graph takes on devices that are named as `read_devices` has them, or on this machine's
    cores as a run took it whose folder is named.

    gpus: accelerators by node; empty: dealt out for the shortest step, with knobs as they are
    declared; auto: knobs of generator and trainer, replicas and ranks are chosen too, for the
    shortest step; auto:cost: for the least cost, where devices may be left unused. workload,
    constants, prices: as `read_workload`, `read_constants` and `read_prices` have them. place: as
    `plan` has it. draw: where a time line goes (.svg), or all figures (.json). GraphError for what
    cannot be read or foreseen.
    """
    if draw is not None and draw.suffix not in (".svg", ".json"):
        raise GraphError(
            f"what is foreseen is drawn as .svg, or written as .json; found '{draw}'; name one of"
            " these"
        )
    room, texts, rates = _asked(devices, read_workload(workload), constants)
    paid = read_prices(prices, room)
    how: dict[str, Any] = {"workload": texts, "steps": steps, "constants": rates}
    if isinstance(gpus, str) and gpus not in AUTO:
        gpus = read_wishes(graph, gpus, room.gpus)
    details, more = "", dict[str, Any]()
    if gpus in AUTO or not (gpus or not room.gpus):
        if place:
            raise GraphError(
                "hosts are chosen with the devices where --gpus does not deal these out, but place"
                f" is given for {sorted(place)}; leave it out, or give --gpus numbers"
            )
        objective = _objective(
            str(gpus or AUTO[0]), room, paid, [*(replicas or {}), *(ranks or {})]
        )
        try:
            choice = choose(graph, room, **how, objective=objective, knobs=bool(gpus))
        except DoesNotFit as error:
            raise advised(
                error, graph, lambda changed: bool(_fitting(changed, roomy(room)))
            ) from None
        best = choice.ways[0]
        candidate, foreseen = best.candidate, best.foreseen
        details = (
            f"\nchosen for the {'least cost' if objective.cost else 'shortest step'}: {best.flags}"
        )
        details += f"\n{ways(choice)}" if choice.tried > 1 else ""
        more = to_plain_choice(choice)
    else:
        assert not isinstance(gpus, str), "words are read"
        placed: dict[str, Any] = {
            "gpus": gpus,
            "replicas": replicas,
            "ranks": ranks,
            "place": place,
        }
        try:
            foreseen = foresee(graph, room, **placed, **how)
        except DoesNotFit as error:
            raise advised(
                error, graph, lambda changed: bool(ground_of(changed, roomy(room), **placed))
            ) from None
        counts = {name: wish for name, wish in (gpus or {}).items() if isinstance(wish, int)}
        shared = [name for name, wish in (gpus or {}).items() if isinstance(wish, str)]
        hosts = {
            node: (names,) if isinstance(names, str) else tuple(names)
            for node, names in (place or {}).items()
        }
        in_turn = (str((gpus or {})[shared[0]]), *shared) if shared else ()
        candidate = Candidate(
            gpus=counts, in_turn=in_turn, replicas=replicas or {}, ranks=ranks or {}, place=hosts
        )
    helping = gains(graph, candidate, room, **how)
    details += f"\n{told_gains(helping)}"
    if draw is not None:
        more["would_help"] = [{"text": gain.text, "share": gain.share} for gain in helping]
        plain = {**to_plain(foreseen), **more}
        text = (
            json.dumps(plain, indent=1) if draw.suffix == ".json" else picture(foreseen, graph.name)
        )
        write_atomically(draw, lambda file: file.write(text.encode()))
        details += f"\nwrote {draw}"
    return f"{lines(foreseen, paid)}{details}"


def is_devices(text: object) -> bool:
    """Whether a word names devices, as 8xH100 does."""
    return isinstance(text, str) and re.match(r"\s*\d+\s*x\s*\w", text) is not None


def explained(graph: Graph, devices: str, **how: Any) -> str:
    """The plan on devices that this machine does not have, and the memory that its operators need
    there.

    devices: as `read_devices` has them; empty: as many as are asked for, of no kind. how: as `plan`
    has it; gpus: None: dealt out for the shortest step. GraphError as `plan`, and for what cannot
    be read.
    """
    gpus = how.pop("gpus")
    if devices:
        room = read_devices(devices)
        machine = f"{devices.strip()}, which need not be here"
    else:
        count = sum(wish for wish in gpus.values() if isinstance(wish, int))
        room = Devices(cpus=this_machine().cpus, gpus=count)
        machine = (
            f"{count} GPU{'s' if count > 1 else ''} of no kind, as this machine has"
            f" {this_machine().gpus}; name yours, as --foresee {count}xH100, and see whether it"
            " fits"
        )
    chosen = ""
    if not gpus or gpus in AUTO:
        gpus = _fitting(graph, room) or _first(graph, room) if room.gpus else None
        chosen = (
            ""
            if gpus is None
            else "; chosen: --gpus " + ",".join(f"{node}={wish}" for node, wish in gpus.items())
        )
    sizes, by = dict[str, ModelSize](), "is known by its files"
    for source in {
        operator.uses.source for operator in graph.operators.values() if operator.uses is not None
    }:
        try:
            sizes[source] = size_of(source)
            by = "is known by its config alone" if sizes[source].is_foreseen else by
        except GraphError as error:
            by = f"is not known, so that nobody can tell what fits: {error}"
    plan = plan_or_advise(graph, room, gpus=gpus, sizes=sizes, **how)
    return f"foreseen: the plan on {machine}; the model's size {by}{chosen}\n{plan.explain()}"


def _fitting(graph: Graph, room: Devices) -> Wishes | None:
    """The first way to deal devices out that fits, with knobs as they are declared, in the shortest
    step by closed forms; None: none does.
    """
    timed = []
    for candidate in candidates(graph, room, knobs=False):
        with contextlib.suppress(GraphError):
            timed.append((foreseen_of(graph, candidate, room, simulated=False).step_s, candidate))
    return min(timed, key=lambda each: each[0])[1].wishes if timed else None


def _first(graph: Graph, room: Devices) -> Wishes | None:
    """The first way to deal devices out, whether it fits or not; of one device, that all take turns
    on it.
    """
    return next((candidate.wishes for candidate in candidates(graph, room, knobs=False)), None)


def _asked(devices: str, texts: Workload, constants: str) -> tuple[Devices, Workload, Constants]:
    """Devices, texts and constants; those of a run where its folder is named, and nothing else
    said.

    GraphError as `look`, and for a run on accelerators, whose kind it does not know.
    """
    path = Path(devices)
    if not path.is_dir():
        return read_devices(devices), texts, read_constants(constants)
    run = look(path)
    if any(placement.get("gpus") for placement in run.placed.values()):
        raise GraphError(
            f"run '{path}' computed on accelerators, and does not say of what kind; calibrate by"
            f" dataflow calibrate {path} --kind H100, say, and foresee 16xH100 with --constants"
            " constants.json"
        )
    if texts.mean_tokens is None:
        texts = replace(texts, run_lengths=run.lengths)
    if texts.prompt_tokens == PROMPT_TOKENS:
        texts = replace(texts, prompt_tokens=run.prompt_tokens)
    texts = replace(
        texts, turns={**run.turns, **texts.turns}, world_s={**run.world_s, **texts.world_s}
    )
    rates = calibrate([run]) if constants == CONSTANTS[0] else read_constants(constants)
    return Devices(cpus=this_machine().cpus), texts, rates


def _objective(
    word: str, room: Devices, prices: Mapping[str, float] | None, flags: Sequence[str]
) -> Objective:
    """What `auto` or `auto:cost` asks for. GraphError where that says nothing here."""
    if flags and not room.gpus:
        raise GraphError(
            f"--gpus {word} chooses replicas and ranks on cores, but they are given for"
            f" {sorted(set(flags))}; leave them out, or leave --gpus out"
        )
    cost = word == AUTO[1]
    if cost and not room.gpus:
        raise GraphError(
            f"--gpus {word} leaves devices unused, but cores of one machine cost the same at work"
            f" or not; use --gpus {AUTO[0]}"
        )
    return Objective(cost=cost, prices=prices)
