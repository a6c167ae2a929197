"""Run folders as a run of fakes leaves them, step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rigs.graphs import fake_graph

from dataflow import Devices, plan, records
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts

STEPS, GROUPS, SIZE = 5, 2, 3
EVIL = "<script>alert(1)</script> \x1b[31m | \u202eturned"


def rollouts(step: int) -> pa.Table:
    """Two groups of three, the first completion of which means harm."""
    ids = np.repeat(np.arange((step - 1) * GROUPS, step * GROUPS), SIZE)
    position = np.tile(np.arange(SIZE, dtype=np.int32), GROUPS)
    count = len(ids)
    made: dict[str, Any] = {
        records.GROUP_ID: ids,
        records.PROMPT_ID: [f"p{each}" for each in ids],
        records.PROMPT: ["what?"] * count,
        records.GROUP_SIZE: [SIZE] * count,
        records.MIN_VERSION: [0] * count,
        records.ROUND_SIZE: [0] * count,
        records.ROLLOUT_ID: ids * SIZE + position,
        records.POSITION: position,
        records.COMPLETION: [EVIL, *(f"answer {step} {at}" for at in range(1, count))],
        records.TOKENS: [[1, 2]] * count,
        records.MASK: [[False, True]] * count,
        records.LOGPROBS: [[0.0, -0.5]] * count,
        records.VERSIONS: [[-1, step - 1]] * count,
        records.FINISH_REASON: ["stop"] * count,
        records.ERROR: ["tool failed" if at == 5 else None for at in range(count)],
    }
    schema = records.schema({**records.PROMPT_COLUMNS, **records.ROLLOUT_COLUMNS})
    table = pa.table(
        [pa.array(made[name], schema.field(name).type) for name in schema.names], schema=schema
    )
    return table.append_column("reward", pa.array([float(at) for at in range(count)], pa.float64()))


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    """Of metrics.jsonl."""
    return {
        "step": step,
        "node": "trainer",
        "version": step,
        "seconds": step * 2.0,
        "loss": loss,
        "reward_mean": 0.1 * step,
        "kl": None,
        "dropped": {"stale": 1},
        "seconds_step": 1.5,
        "seconds_publish": 0.25,
        "rollouts": 6,
        "generated_tokens_per_s": 100.0,
        "weights_sent": {"a>b": {"bytes": 1}},
        **more,
    }


def made(root: Path, steps: int = STEPS) -> RunFolder:
    """Of a run that has made so many steps."""
    folder = RunFolder.create(root, "fakes", now=1.7e9)
    graph = fake_graph(max_staleness=2)
    planned = plan(graph, Devices(cpus=2))
    with Ledger.create(folder.ledger, consumers(graph)) as ledger:
        facts = {
            "begun": 1.7e9,
            "seed": 7,
            "steps": steps,
            "environment": {"packages": {"torch": "9"}},
        }
        describe(folder, ledger, graph_facts(graph), facts | plan_facts(graph, planned))
    graph.draw(folder.graph_svg)
    for step in range(1, steps + 1):
        add(folder, step)
    folder.write_json("times.json", {"outcome": "finished", "seconds": 9.0, "busy_seconds": {}})
    return folder


def add(folder: RunFolder, step: int) -> None:
    """One more step."""
    groups = range((step - 1) * GROUPS, step * GROUPS)
    with Ledger.open(folder.ledger) as ledger:
        ledger.issue("prompts", [(group, f"p{group}") for group in groups])
        folder.rollouts_of().write(step, rollouts(step))
        ledger.commit_step("trainer", step, version=step, source="prompts", trained=groups)
    folder.append_metrics(line(step, 1.0 / step))
