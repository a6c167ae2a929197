"""Whether 64 H100 and 64 L40S together make a step faster than either kind alone, or dealt out by
hand.

    python -m bench.foresight --unlike --json OUT         # some minutes on one core; nothing is run
                                                          but the simulation

`auto` searches all ways (dataflow/foresight/choice). The ways by hand have the trainer on one kind
and the generator on the other, or give each operator half of each kind; of these, too, the best of
the generator's knobs is taken.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Report
from dataflow import Graph, GraphError, Model
from dataflow.foresight.choice.candidates import (
    Candidate,
    best_learner,
    generators,
    learners,
    step_of,
)
from dataflow.foresight.choice.search import Way, choose, foreseen_of
from dataflow.foresight.command import read_devices
from dataflow.foresight.rates import ASSUMED
from dataflow.foresight.workload import Workload
from dataflow.planning.hosts import Devices

FAST, SLOW, EACH = "H100", "L40S", 64
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and what is said of its texts."""

    name: str
    prompts: int
    group_size: int
    max_tokens: int
    max_staleness: int
    workload: Workload = field(default_factory=Workload)

    @property
    def steps(self) -> int:
        """That are simulated: a dozen more than pass until versions are as old as they may be."""
        return 2 * (self.max_staleness + 1) + 12


CASES = (
    Case(
        name="512 x 8, even lengths, staleness 8",
        prompts=512,
        group_size=8,
        max_tokens=960,
        max_staleness=8,
        workload=Workload(mean_tokens=640, prompt_tokens=100, sigma=0.3),
    ),
    Case(
        name="256 x 16, long tail, staleness 2",
        prompts=256,
        group_size=16,
        max_tokens=2048,
        max_staleness=2,
        workload=Workload(mean_tokens=512, sigma=0.8),
    ),
)
SIMULATED = 3
"""Ways by hand that are simulated, the best by closed forms."""


def unlike(path: Path | None) -> int:
    """Foresee both cases, and say what was best of each."""
    report, console = Report("foresight", path), Console(width=170)
    with tempfile.TemporaryDirectory(prefix="unlike-") as folder:
        for case in CASES:
            graph = build(case, Path(folder))
            ways = {
                name: (
                    choose(
                        graph, read_devices(text), workload=case.workload, steps=case.steps
                    ).ways[0]
                )
                for name, text in alone().items()
            }
            ways |= {name: by_hand(graph, case, operators) for name, operators in dealt().items()}
            best = choose(graph, both(), workload=case.workload, steps=case.steps).ways[0]
            for name, way in (*ways.items(), ("auto", best)):
                report.add(
                    case=case.name,
                    system=name,
                    step_s=way.foreseen.step_s,
                    devices=" | ".join(
                        operation.devices
                        for operation in way.foreseen.operations
                        if operation.kinds
                    ),
                    over_auto=way.foreseen.step_s / best.foreseen.step_s - 1,
                    asked=None if name in dealt() else way.flags,
                )
    report.show(console)
    return 0


def both() -> Devices:
    """All of both kinds."""
    return read_devices(f"{EACH}x{FAST}+{EACH}x{SLOW}")


def alone() -> dict[str, str]:
    """One kind, all of it, as the best way has it."""
    return {f"{EACH} {kind} alone": f"{EACH}x{kind}" for kind in (FAST, SLOW)}


def dealt() -> dict[str, Mapping[str, Sequence[str]]]:
    """By hand: hosts of trainer and generator."""
    of = {kind: [host.name for host in both().hosts if host.kind == kind] for kind in (FAST, SLOW)}
    half = len(of[FAST]) // 2
    return {
        f"{FAST} train, {SLOW} generate": {"trainer": of[FAST], "generator": of[SLOW]},
        f"{SLOW} train, {FAST} generate": {"trainer": of[SLOW], "generator": of[FAST]},
        "half of each kind to each": {
            "trainer": of[FAST][:half] + of[SLOW][:half],
            "generator": of[FAST][half:] + of[SLOW][half:],
        },
    }


def by_hand(graph: Graph, case: Case, places: Mapping[str, Sequence[str]]) -> Way:
    """The best that the operators' knobs make of this. GraphError where none fits."""
    devices, ways = both(), list[Way]()
    counts = {
        node: sum(host.gpus for host in devices.hosts if host.name in names)
        for node, names in places.items()
    }
    trainer: Any = graph.operators["trainer"]
    generator: Any = graph.operators["generator"]
    hosts = [host for host in devices.hosts if host.name in places["trainer"]]
    learner = best_learner(
        graph,
        trainer,
        learners(trainer, hosts),
        hosts,
        counts["trainer"],
        step_of(graph, trainer, generator, case.workload, ASSUMED),
    )
    refused = ""
    how: dict[str, Any] = {"workload": case.workload, "steps": case.steps}
    for knobs in generators(generator, devices):
        candidate = Candidate(
            gpus=counts,
            knobs=knobs,
            learner=learner,
            place={node: tuple(names) for node, names in places.items()},
        )
        try:
            foreseen = foreseen_of(
                candidate.placed(graph), candidate, devices, **how, simulated=False
            )
        except GraphError as error:
            refused = str(error)
            continue
        ways.append(
            Way(candidate=candidate, foreseen=foreseen, flags=candidate.flags(graph, devices))
        )
    if not ways:
        raise GraphError(refused)
    ways = [
        replace(
            way, foreseen=foreseen_of(way.candidate.placed(graph), way.candidate, devices, **how)
        )
        for way in sorted(ways, key=lambda way: way.foreseen.step_s)[:SIMULATED]
    ]
    return min(ways, key=lambda way: way.foreseen.step_s)


def build(case: Case, folder: Path) -> Graph:
    """Policy, exact answers, trainer; of the model there is a config.json alone."""
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.rewards import find

    source = folder / "llama-8b"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(LLAMA_8B))
    graph, model = Graph("unlike"), Model(str(source), dtype="bfloat16")
    generator = Generator(model, group_size=case.group_size, max_tokens=case.max_tokens)
    trainer = Trainer(model, prompts_per_step=case.prompts, lr=1e-6, gradient_checkpointing=True)
    prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    trainer(advantage(find("exact")(generator(graph.source(prompts)))))
    graph.feedback(trainer.weights, generator, max_staleness=case.max_staleness)
    return graph
