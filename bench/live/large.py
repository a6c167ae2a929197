"""The folder of a run as large as a page is to show, by the writers of runs, and what its scheduler
would say.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bench.run_folder import step_rows
from dataflow import Graph, Model, scorer
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

KEPT, GROUP, PROMPTS = 60, 8, 8
"""Steps whose rollouts are kept, and what one holds."""
BRANCHES = 25
"""Chains beside each other, of which the trainer reads one."""
ACTIVITY = 100
"""Lines of activity.jsonl."""
MANY = 24
"""Further figures of a step."""


@scorer
def length(completion: str) -> int:
    """Characters."""
    return len(completion)


def graph_of(operators: int) -> Graph:
    """So many operators between a generator and a trainer, in chains beside each other."""
    graph = Graph("large")
    rollouts = FakeGenerator(model=Model("policy"))(graph.source(FakePrompts()))
    for branch in range(BRANCHES):
        stream = rollouts
        for number in range(operators // BRANCHES):
            stream = length.renamed(f"check_{branch}_{number}")(stream)
        if branch == 0:
            FakeTrainer(model=Model("other"), prompts_per_step=PROMPTS)(stream)
        else:
            FakeTrainer(
                model=Model(f"other-{branch}"), name=f"trainer_{branch}", prompts_per_step=PROMPTS
            )(stream)
    return graph


def write(root: Path, operators: int, steps: int) -> RunFolder:
    """The folder of a run of this graph that made so many steps."""
    graph, folder = graph_of(operators), RunFolder.create(root, "large")
    random = np.random.default_rng(0)
    with Ledger.create(folder.ledger, consumers(graph)) as ledger:
        describe(
            folder, ledger, graph_facts(graph), plan_facts(graph, plan(graph, Devices(cpus=2)))
        )
    graph.draw(folder.graph_svg)
    rewards = np.clip(np.linspace(0.1, 0.8, steps) + random.normal(0, 0.1, steps), 0, 1)
    values = random.normal(0, 1, (64, MANY))
    with folder.metrics.open("w") as file:
        for step in range(1, steps + 1):
            numbers = ", ".join(
                f'"figure_{at}": {value:.5f}' for at, value in enumerate(values[step % 64])
            )
            file.write(
                f'{{"step": {step}, "node": "trainer", "seconds": {step / 4}, "reward_mean":'
                f' {rewards[step - 1]:.4f}, "loss": {1 / step:.6f}, "kl":'
                f' {0.01 + 0.001 * (step % 7)}, "staleness_mean": {step % 4}, "staleness_max": 4,'
                f' "trained_tokens_per_s": {9000 + step % 911}, {numbers}}}\n'
            )
    names = [node["name"] for node in graph_facts(graph)["nodes"]]
    for at in range(ACTIVITY):
        report = {
            "replicas": 1,
            "busy": at * 0.4,
            "waiting": at * 0.5,
            "blocked": at * 0.1,
            "measured": at,
            "rows_in": at,
            "rows_out": at,
        }
        folder.note_activity(
            float(at), {name: {**report, "step": at * steps // ACTIVITY} for name in names}
        )
    with Ledger.open(folder.ledger) as ledger:
        (source,) = ledger.sources("trainer")
        for step in range(1, steps - KEPT + 1):
            ledger.commit_step("trainer", step, version=step, source=source, trained=[])
        for number, step in enumerate(range(steps - KEPT + 1, steps + 1)):
            groups = range(number * PROMPTS, (number + 1) * PROMPTS)
            ledger.issue(source, [(group, f"p{group}") for group in groups])
            ledger.commit_step("trainer", step, version=step, source=source, trained=groups)
            folder.rollouts_of("trainer").write(
                step, step_rows(step, groups.start, PROMPTS, GROUP, 200)
            )
    return folder


def told(graph: Graph, rows: int) -> dict[str, Any]:
    """What the scheduler of this run would say, once so many rows went through each node."""
    share = {"busy": rows * 0.4, "waiting": rows * 0.5, "blocked": rows * 0.1, "starved": 0.0}
    facts = graph_facts(graph)
    names = [node["name"] for node in facts["nodes"]]
    nodes = {
        name: {
            "seconds": share,
            "measured_s": float(rows),
            "rows_in": rows,
            "rows_out": rows,
            "status": {},
            "ended": False,
            "blocked": False,
        }
        for name in names
    }
    data = [edge for edge in facts["edges"] if edge["plane"] == "data"]
    edges = {f"{edge['from']}>{edge['to']}:{edge['source']}": [rows % 9, 8] for edge in data}
    worker = {
        "state": "ready",
        "pid": 0,
        "silent_s": 0.1,
        "heartbeat": {"nodes": nodes, "edges": edges},
        "nodes": names,
    }
    return {
        "phase": "training",
        "draining": False,
        "step": 9,
        "steps": 99,
        "still_s": 0.2,
        "pid": 0,
        "history": {},
        "workers": {"all-0": worker},
    }
