"""What would help most: single changes around a way, each simulated."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.errors import GraphError
from dataflow.foresight.choice.candidates import Candidate, generators
from dataflow.foresight.choice.search import foreseen_of
from dataflow.foresight.foresee import Foreseen, only
from dataflow.graph import Graph
from dataflow.node import Generate, Learn
from dataflow.planning.hosts import Devices

STEPS = 24
"""Steps simulated for each change, and for the unchanged way."""
LEAST = 0.01
"""Share of a step: a smaller gain is not reported."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a way; without a text, the way itself."""

    text: str = ""
    graph: Graph
    candidate: Candidate
    devices: Devices


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a change gains."""

    text: str
    share: float
    """The share of a step's seconds that it saves."""


def gains(graph: Graph, candidate: Candidate, devices: Devices, **how: Any) -> Sequence[Gain]:
    """Changes that make a step shorter by a hundredth or more, the one that saves most first; what
    `check` or `plan` refuses is no change.

    how: as `foresee` has it; of each change a stretch of some steps is simulated, with the same
    lengths.
    """
    how["steps"] = min(how.get("steps") or STEPS, STEPS)
    before = _step_s(
        Change(graph=candidate.placed(graph), candidate=candidate, devices=devices), how
    )
    gained = []
    for change in changes(graph, candidate, devices):
        try:
            after = _step_s(change, how)
        except GraphError:
            continue
        gained.append(Gain(text=change.text, share=1 - after / before))
    return sorted((gain for gain in gained if gain.share >= LEAST), key=lambda each: -each.share)


def told(gained: Sequence[Gain]) -> str:
    """One line: the best, or the best two."""
    if not gained:
        return f"no single change that is at hand saves {LEAST:.0%} of a step"
    return "what would help most (seconds of a step): " + ", ".join(
        f"{gain.text}: {-gain.share:+.0%}" for gain in gained[:2]
    )


def changes(graph: Graph, candidate: Candidate, devices: Devices) -> Iterator[Change]:
    """All single changes that could be made: bounds, knobs, one replica more."""
    placed, devices = candidate.placed(graph), candidate.on(devices)
    candidate = replace(candidate, kinds=())
    now = Change(graph=placed, candidate=candidate, devices=devices)
    trainer, generator = only(placed, Learn), only(placed, Generate)
    bound = next(
        (feedback.max_staleness for feedback in placed.feedbacks if feedback.reader is generator),
        None,
    )
    if bound is not None:
        yield replace(
            now,
            text=f"staleness {bound + 1} instead of {bound}",
            graph=staler(placed, generator, bound + 1),
        )
    tried: list[dict[str, Any]] = [
        {knob: value}
        for way in generators(generator, devices)
        for knob, value in way.items()
        if len(way) == 1
    ]
    slots = getattr(generator, "slots", None)
    tried += [{"slots": 2 * slots}] if slots else []
    unit = generator.traits.split.tensor_parallel
    for knobs in tried:
        ranks = knobs.get("tensor_parallel", unit)
        if candidate.gpus and candidate.count(generator.name) % ranks:
            continue
        yield from _with(now, generator, knobs)
    if trainer.traits.training.gradient_checkpointing:
        yield from _with(now, trainer, {"gradient_checkpointing": False})
    if not candidate.gpus:
        more = candidate.replicas.get(generator.name, 1) + 1
        yield replace(
            now,
            text="one more replica of the generator",
            candidate=replace(candidate, replicas={**candidate.replicas, generator.name: more}),
        )
        return
    if candidate.in_turn:
        alone = candidate.count(generator.name)
        gpus = {**candidate.gpus, **dict.fromkeys(candidate.in_turn[1:], alone)}
        more = alone * (len(candidate.in_turn) - 1)
        yield replace(
            now,
            text=f"devices of its own for each ({more} more)",
            devices=more_of(devices, more),
            candidate=replace(candidate, gpus=gpus, in_turn=()),
        )
        return
    for operator, count, text in (
        (generator, unit, "one more replica of the generator"),
        (trainer, candidate.gpus[trainer.name], "a trainer of twice the devices"),
    ):
        gpus_now = sum(candidate.gpus.values())
        gpus = {**candidate.gpus, operator.name: candidate.gpus[operator.name] + count}
        rented = more_of(devices, max(0, gpus_now + count - devices.gpus))
        yield replace(
            now,
            text=f"{text} ({count} more)",
            candidate=replace(candidate, gpus=gpus),
            devices=rented,
        )


def staler(graph: Graph, reader: Generate, bound: int) -> Graph:
    """The graph with another bound; the one that is given stays as it is."""
    changed = copy.copy(graph)
    changed.feedbacks = [
        dataclasses.replace(feedback, max_staleness=bound)
        if feedback.reader is reader
        else feedback
        for feedback in graph.feedbacks
    ]
    return changed


def more_of(devices: Devices, count: int) -> Devices:
    """The devices, with `count` more of the last kind, on hosts like its first."""
    if count == 0:
        return devices
    last = next(host for host in devices.hosts if host.kind == devices.hosts[-1].kind)
    more = [
        replace(last, name=f"{last.kind}-more{number}") for number in range(-(-count // last.gpus))
    ]
    return Devices.of([*devices.hosts, *more])


def _with(now: Change, operator: Any, knobs: dict[str, Any]) -> Iterator[Change]:
    """With other knobs of one operator, if it takes them."""
    text = ", ".join(f"{knob}={value!r} of '{operator.name}'" for knob, value in knobs.items())
    try:
        graph = now.graph.swap(operator.name, dataclasses.replace(operator, **knobs))
    except GraphError:
        return
    yield replace(now, text=text, graph=graph)


def _step_s(change: Change, how: dict[str, Any]) -> float:
    foreseen: Foreseen = foreseen_of(change.graph, change.candidate, change.devices, **how)
    return foreseen.step_s
