"""Which way of placing a graph takes the shortest step, or the least cost: many by closed forms,
the best of them by simulation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import GraphError
from dataflow.foresight.choice.candidates import Candidate, candidates
from dataflow.foresight.counts import size_of
from dataflow.foresight.foresee import Foreseen, foresee, foreseen_on, ground_of, only
from dataflow.foresight.rates import ASSUMED_CONSTANTS, Constants
from dataflow.foresight.report import number
from dataflow.foresight.scenarios import Foreground
from dataflow.foresight.workload import Workload
from dataflow.graph import Graph
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices
from dataflow.planning.memory_need import DoesNotFit, by_way, need_of
from dataflow.planning.placement import table

BEST = 10
"""The number of ways that are reported."""
FAR = 1.75
"""A way that takes so many times as much by closed forms as another by simulation is not
simulated."""
ALIKE = 0.02
"""On cores, where each process is in the way of the others: ways that differ from the best by less
are as good, as far as anybody can foresee."""
_SIMULATED_ON_CORES, _OTHERS = 40, 6
_REASONS = (
    ("does not fit into", "do not fit into memory"),
    ("leaves no room for a rollout", "do not fit into memory"),
    ("in a row on one host", "find no room on their hosts"),
    ("no host", "find no room on their hosts"),
    ("hosts have", "need more devices"),
    ("this machine has", "need more devices"),
    ("has no measured", "are of a kind that was not measured"),
    ("does not divide", "do not divide evenly"),
    ("give it a multiple of", "do not divide evenly"),
)
"""Words in a refusal, and the reason that a summary gives for all refusals with them."""
_ROW = re.compile(r"needs \d+ GPUs? of ([\d.]+) (\w+) in a row.*?GPUs? of ([\d.]+) (\w+) free")
"""In a refusal: what a rank needs, and what devices have."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way, and what it takes."""

    candidate: Candidate
    foreseen: Foreseen
    flags: str
    """The flags that ask for it."""

    @property
    def gpus(self) -> Wishes:
        """Accelerators by node, as `plan` has them."""
        return self.candidate.wishes

    @property
    def processes(self) -> int:
        """Of all operators."""
        return sum(operation.count for operation in self.foreseen.operations)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the search minimizes."""

    cost: bool = False
    """Devices times seconds, or money; else the seconds of a step."""
    prices: Mapping[str, float] | None = None
    """Of a device for an hour, by kind."""

    def of(self, foreseen: Foreseen) -> tuple[float, float]:
        """The key to compare by; the least comes first."""
        return (
            (cost_of(foreseen, self.prices), foreseen.step_s)
            if self.cost
            else (foreseen.step_s, cost_of(foreseen, self.prices))
        )


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What came of a search."""

    ways: Sequence[Way]
    """The best ten, the best first."""
    tried: int
    simulated: int
    refused: Mapping[str, int]
    """Ways by the reason for which `check` or `plan` refuses them."""
    objective: Objective


def cost_of(foreseen: Foreseen, prices: Mapping[str, float] | None = None) -> float:
    """Of a step: seconds of all devices that it has, or money, where prices of an hour are given by
    kind.
    """
    if prices is None:
        return foreseen.step_s * sum(foreseen.taken.values())
    return (
        foreseen.step_s / 3600 * sum(count * prices[kind] for kind, count in foreseen.taken.items())
    )


def choose(
    graph: Graph,
    devices: Devices,
    *,
    workload: Workload | None = None,
    steps: int | None = None,
    constants: Constants = ASSUMED_CONSTANTS,
    objective: Objective | None = None,
    knobs: bool = True,
) -> SearchResult:
    """The best ten of a thousand ways, the best first; the graph stays as it is.

    knobs: parallelism of generator and trainer, the generator's precision and of unlike devices
    which each has are chosen too. Simulated are, of each setting of the generator's knobs and
    kinds, the best by closed forms unless it is far off, the best ten of all, and some more of the
    setting that leads; briefly, and whatever then leads at length, until that stays the best. On
    cores, of which closed forms know little, all are, where they are few. GraphError where no way
    fits: why the last with the declared knobs did not.
    """
    objective = objective or Objective()
    how = {"workload": workload, "steps": steps, "constants": constants}

    def simulated(at: int, *, brief: bool) -> Way:
        _, _, candidate, ground = ranking[at]
        foreseen = foreseen_on(ground, steps=steps, brief=brief)
        return Way(candidate=candidate, flags=candidate.flags(graph, devices), foreseen=foreseen)

    def least_of(ways: Iterable[Way]) -> float:
        return min((objective.of(way.foreseen)[0] for way in ways), default=float("inf"))

    ranking: list[tuple[tuple[float, float], int, Candidate, Foreground]] = []
    refused: Counter[str] = Counter()
    swapped: dict[str, Graph | GraphError] = {}
    lacks_memory = LacksMemory()
    tried = candidates(
        graph, devices, knobs=knobs, idle=objective.cost, workload=workload, rates=constants.learner
    )
    for order, candidate in enumerate(tried):
        try:
            placed = _placed(graph, candidate, swapped)
            if lacks_memory(placed, candidate, devices):
                raise GraphError(_REASONS[0][0])
            ground = _ground(placed, candidate, devices, **how)
            estimate = foreseen_on(ground, steps=steps, simulated=False)
        except GraphError as error:
            refused[reason(str(error))] += 1
            continue
        ranking.append((objective.of(estimate), order, candidate, ground))
    if not ranking:
        _blame(graph, tried, devices, **how)
        raise GraphError(
            f"devices are too few for trainer and generator; found {devices.gpus}; name more, as in"
            " 16xH100"
        )
    ranking.sort(key=lambda each: each[:2])
    promising = _promising([place[2] for place in ranking], all_of=not devices.gpus)
    best: dict[int, Way] = {}
    brief = bool(devices.gpus)
    for at in promising:
        if not brief or ranking[at][0][0] <= FAR * least_of(best.values()):
            best[at] = simulated(at, brief=brief)
    leads = min(best, key=lambda at: objective.of(best[at].foreseen))
    for at in _others([place[2] for place in ranking], ranking[leads][2], promising):
        best[at] = simulated(at, brief=brief)
    at_length: set[int] = set()
    while (
        brief
        and (leads := min(best, key=lambda at: objective.of(best[at].foreseen))) not in at_length
    ):
        best[leads] = simulated(leads, brief=False)
        at_length.add(leads)
    ways = ranked([*best.values()], objective, 0.0 if devices.gpus else ALIKE)
    return SearchResult(
        ways=ways[:BEST],
        tried=len(tried),
        simulated=len(best),
        refused=dict(refused.most_common()),
        objective=objective,
    )


def _blame(graph: Graph, tried: Sequence[Candidate], devices: Devices, **how: Any) -> None:
    """Raise the reason why no way is accepted: of the declared ways, that of the one which lacks
    the least memory; else that of the last one.
    """
    errors: list[GraphError] = []
    for candidate in [way for way in tried if not way.knobs] or tried:
        try:
            foreseen_of(candidate.placed(graph), candidate, devices, simulated=False, **how)
        except GraphError as error:
            errors.append(error)
    if errors:
        lacking = [error for error in errors if isinstance(error, DoesNotFit)]
        raise min(lacking, key=lambda each: each.missing) if lacking else errors[-1]


def ranked(ways: Sequence[Way], objective: Objective, alike: float) -> list[Way]:
    """The best first; of those that are as good as the best, the one with the fewest processes, of
    these the best.
    """
    best_first = sorted(ways, key=lambda way: objective.of(way.foreseen))
    least = objective.of(best_first[0].foreseen)[0]
    many = sum(objective.of(way.foreseen)[0] <= (1 + alike) * least for way in best_first)
    return sorted(best_first[:many], key=lambda way: way.processes) + best_first[many:]


def _ground(graph: Graph, candidate: Candidate, devices: Devices, **how: Any) -> Foreground:
    """As `foreseen_of`, before anything is counted."""
    return ground_of(
        graph,
        candidate.on(devices),
        gpus=candidate.wishes or None,
        replicas=candidate.replicas,
        ranks=candidate.ranks,
        place=candidate.place or None,
        **how,
    )


class LacksMemory:
    """Tells ways of which no device could hold a rank: most ways of a large model are such, and to
    plan each of them to be refused takes a while.
    """

    def __init__(self) -> None:
        self._needs: dict[tuple[str, str, int, bool], int] = {}

    def __call__(self, graph: Graph, candidate: Candidate, devices: Devices) -> bool:
        """Whether generator or trainer lacks it. graph: with the candidate's knobs."""
        rooms = [host.gpu_memory_bytes for host in candidate.on(devices).hosts if host.gpus]
        if not rooms or not all(rooms):
            return False
        generator = only(graph, Generate)
        trainer = only(graph, Learn)
        return any(
            self._need(graph, operator, candidate, ranks) > max(rooms)
            for operator, ranks in (
                (generator, generator.traits.split.tensor_parallel),
                (trainer, candidate.count(trainer.name)),
            )
        )

    def _need(self, graph: Graph, operator: Operator, candidate: Candidate, ranks: int) -> int:
        in_turn = operator.name in candidate.in_turn
        key = (operator.name, candidate.declared, ranks, in_turn)
        if key not in self._needs and operator.uses is not None:
            ways = operator.traits.ways
            need = need_of(
                graph,
                by_way(operator, ways[-1] if ways else {}),
                size_of(operator.uses.source),
                ranks,
                on_gpu=True,
                in_turn=in_turn,
            )
            self._needs[key] = need.total if need is not None else 0
        return self._needs.get(key, 0)


def foreseen_of(graph: Graph, candidate: Candidate, devices: Devices, **how: object) -> Foreseen:
    """The forecast of a candidate. graph: with its knobs."""
    return foresee(
        graph,
        candidate.on(devices),
        gpus=candidate.wishes or None,
        replicas=candidate.replicas,
        ranks=candidate.ranks,
        place=candidate.place or None,
        **how,  # type: ignore[arg-type]
    )


def reason(message: str) -> str:
    """What messages of one kind have in common: names and numbers are left out.

    >>> reason("the plan does not fit into the memory of gpu 0: it needs 90 GiB; give it more")
    'do not fit into memory'
    >>> reason("'generator' got a temper of 3; use 1")
    "are refused: '..' got a temper of .."
    """
    if (row := _ROW.search(message)) is not None and _bytes(row[1], row[2]) > _bytes(
        row[3], row[4]
    ):
        return _REASONS[0][1]
    for pattern, text in _REASONS:
        if pattern in message:
            return text
    return "are refused: " + re.sub(
        r"\d[\d,.]*", "..", re.sub(r"'[^']*'", "'..'", re.split("[;:]", message)[0])
    )


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def _placed(graph: Graph, candidate: Candidate, plans: dict[str, Graph | GraphError]) -> Graph:
    """The graph with a candidate's knobs, checked once for all candidates that have them."""
    key = candidate.declared
    if key not in plans:
        try:
            plans[key] = candidate.placed(graph)
        except GraphError as error:
            plans[key] = error
    plan = plans[key]
    if isinstance(plan, GraphError):
        raise plan
    return plan


def _promising(tried: Sequence[Candidate], *, all_of: bool) -> list[int]:
    """Indices of the candidates to simulate, in the order of closed forms: the best ten, and the
    best of each setting.
    """
    if all_of and len(tried) <= _SIMULATED_ON_CORES:
        return [*range(len(tried))]
    firsts: dict[str, int] = {}
    for at, candidate in enumerate(tried):
        firsts.setdefault(candidate.setting, at)
    return sorted({*firsts.values(), *range(min(BEST, len(tried)))})


def _others(ranking: Sequence[Candidate], leads: Candidate, promising: Sequence[int]) -> list[int]:
    """A few more candidates of the leading setting, far apart: closed forms know no tails, and may
    misjudge.
    """
    alternatives = [
        at
        for at, candidate in enumerate(ranking)
        if candidate.setting == leads.setting and at not in promising
    ]
    alternatives.sort(key=lambda at: (sum(ranking[at].gpus.values()), *ranking[at].gpus.values()))
    step = max(1, len(alternatives) // _OTHERS)
    return alternatives[step // 2 :: step][:_OTHERS]


# A result as text and as JSON.


def ways(choice: SearchResult) -> str:
    """The best ways, why the others lose, and which were refused."""
    prices, best = choice.objective.prices, choice.ways[0]
    sought = choice.objective.cost
    head = ["ways to place it", "step, s"]
    if best.foreseen.taken:
        head += ["cost of a step" if prices is not None else "device seconds"]
    rows = []
    for way in choice.ways:
        foreseen = way.foreseen
        cost = cost_of(foreseen, prices)
        least = cost_of(best.foreseen, prices) if sought else best.foreseen.step_s
        more = "" if way is best else f"{(cost if sought else foreseen.step_s) / least - 1:+.0%}"
        rows.append(
            (
                way.flags,
                number(foreseen.step_s),
                *([number(cost)] if foreseen.taken else []),
                more,
                f"'{foreseen.bottleneck.node}' is busy longest",
                f"staleness {foreseen.staleness:.1f}",
            )
        )
    summary = f"{choice.tried:,} ways looked at, {choice.simulated} simulated"
    if choice.refused:
        refused = ", ".join(f"{count:,} {why}" for why, count in choice.refused.items())
        summary += f"; {sum(choice.refused.values()):,} refused: {refused}"
    return "\n".join(["", *table([(*head, "", "why", ""), *rows], ruled=True), summary])


def to_plain(choice: SearchResult) -> dict[str, Any]:
    """For JSON: the best ways, and what was looked at."""
    return {
        "ways": [
            {
                "asked": way.flags,
                "step_s": way.foreseen.step_s,
                "taken": way.foreseen.taken,
                "cost_of_a_step": cost_of(way.foreseen, choice.objective.prices),
            }
            for way in choice.ways
        ],
        "ways_tried": choice.tried,
        "ways_simulated": choice.simulated,
        "ways_refused": dict(choice.refused),
    }
