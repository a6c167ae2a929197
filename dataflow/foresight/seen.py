"""What a run folder says of its operators' seconds, and of its texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataflow.errors import GraphError
from dataflow.folder.run_folder import RunFolder
from dataflow.foresight.counts import Counts, counts_of
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.training import LAST
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.records import MASK, TOKENS, TURN
from dataflow.structure import lines_of

_STRETCHES = 6
_FILES = 20
"""Rollouts that are read."""
_OF_A_SIZE = {"steps": "steps", "rollouts": "rollouts", "looked": "looked", "seconds": "s"}
_SIZE = re.compile(r"decode_\d+_s")


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Decode steps with about equally many rollouts."""

    steps: float
    rollouts: float
    looked: float
    """Tokens that these looked back at; both are sums over the steps."""
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivitySpan:
    """What one node did between two lines of activity.jsonl."""

    seconds: float
    busy_s: float
    """Of all its replicas."""
    beside_s: float = 0.0
    """The part of these that the node's own processes spent."""
    steps: float
    """Decode steps of a generator, steps of a trainer."""
    tokens: float
    looked: float = 0.0
    """Tokens before those that a generator drew, its own prompts' too: attention looks back at
    them."""
    rows_in: float
    rows_out: float
    decoded: Sequence[Decoded] = ()
    """Decode steps that began no rollout, by about how many they carried on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenRun:
    """One run."""

    path: Path
    generator: str
    trainer: str
    model: Counts
    placed: Mapping[str, Mapping[str, Any]]
    """By node: worker, replicas, ranks, gpus, threads."""
    cores: int = 2
    """Of a host."""
    max_staleness: int
    group_size: int
    prompts_per_step: int
    micro_batch_tokens: int = 0
    """Most of one pass of the trainer; 0: not known."""
    prompt_tokens: float
    lengths: Lengths
    stretches: Mapping[str, Sequence[ActivitySpan]]
    """By node."""
    steps: Sequence[Mapping[str, Any]]
    """The trainer's lines of metrics.jsonl, without the first ones."""
    calls_at_once: Mapping[str, int] = field(default_factory=dict)
    """By scorer, in all its processes; one where it is not named."""
    scorers: Collection[str] = ()
    """They pass on every row that they are done with; those that come may wait for long."""
    in_turn: Sequence[Sequence[str]] = ()
    """Nodes that take turns on devices."""
    turns: Mapping[str, float] = field(default_factory=dict)
    """Of the policy in a rollout, in the mean, by episode."""
    world_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two turns, in the mean, by episode."""

    @property
    def step_s(self) -> float:
        """Of a step, in the mean, once the pipeline is full."""
        ends = [float(line["seconds"]) for line in self.steps]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def drift(self) -> float:
        """Seconds of a step in the slowest third of the run over those in the fastest: as the run
        does the same all the time, it is the machine that was not the same.
        """
        ends = np.array([float(line["seconds"]) for line in self.steps])
        thirds = [part.mean() for part in np.array_split(np.diff(ends), 3)]
        return float(max(thirds) / min(thirds))

    @property
    def staleness(self) -> float:
        """Mean, in versions."""
        return float(np.mean([line["staleness_mean"] for line in self.steps]))

    @property
    def efficiency(self) -> float:
        """Share of its seconds that what bounds it was at work, each replica in the mean."""
        busy: dict[str, float] = {}
        beside: dict[str, float] = {}
        for node, stretches in self.stretches.items():
            seconds = sum(stretch.seconds for stretch in stretches) * int(
                self.placed.get(node, {}).get("replicas", 1)
            )
            if seconds:
                busy[node] = sum(stretch.busy_s for stretch in stretches) / seconds
                beside[node] = sum(stretch.beside_s for stretch in stretches) / seconds
        bound = bounded(1.0, busy, beside, {"placed": self.placed, "turns": self.in_turn})
        return bound.share if bound else 0.0

    @property
    def computed(self) -> float:
        """Tokens that the trainer passed over, of those that it may pass over: each group's prompt
        once, and of each rollout all but the last.
        """
        row_tokens = [
            line["rollouts"] * (line["completion_tokens_mean"] - LAST)
            + line["groups"] * self.prompt_tokens
            for line in self.steps
        ]
        return float(sum(line["computed_tokens"] for line in self.steps) / sum(row_tokens))


def look(path: Path) -> SeenRun:
    """Read a run folder. GraphError where it lacks what a calibration needs: what, and what to
    do.
    """
    folder = RunFolder.open(path)
    graph, config = described(folder)
    ends = [
        (edge["from"], edge["to"])
        for edge in graph.get("edges", [])
        if edge["plane"] == "weights" and edge.get("max_staleness") is not None
    ]
    if len(ends) != 1:
        raise GraphError(
            f"run '{path}' has {len(ends)} readers of new weights; a calibration needs one"
            " generator"
        )
    trainer, generator = ends[0]
    recorded = lines_of(folder.read_metrics(), trainer)
    steps = [line for line in recorded if "eval_accuracy" not in line]
    bound = int((config.get("max_staleness") or {}).get(trainer) or 0)
    counted = steps[2 * (bound + 1) + len(steps) // 10 : len(steps) - bound]
    if len(counted) < 10:
        raise GraphError(
            f"run '{path}' has {len(steps)} steps, of which {len(counted)} can be counted; a"
            f" calibration needs 10, so let it make {10 + 3 * (bound + 2)} or more"
        )
    checkpoint = folder.latest_checkpoint(node=None)
    if checkpoint is None:
        raise GraphError(
            f"run '{path}' has no checkpoint left, whose config.json says what model it is; take"
            " another"
        )
    prompt, lengths, turns = _texts(folder, [int(line["step"]) for line in counted])
    lines = _between(
        folder.read_activity(), trainer, int(counted[0]["step"]), int(counted[-1]["step"])
    )
    nodes = {node["name"]: node for node in graph["nodes"]}
    stretches = {name: _activity_spans(lines, name) for name in nodes}
    if not stretches[generator]:
        raise GraphError(
            f"run '{path}' has no activity.jsonl with what its nodes did; it was made by an earlier"
            " version, or was too short: take a run of some ten seconds"
        )
    world_s = _worlds(lines)
    return SeenRun(
        turns=dict.fromkeys(world_s, turns),
        world_s=world_s,
        path=path,
        generator=generator,
        trainer=trainer,
        model=counts_of(str(checkpoint)),
        placed=config["placed"],
        cores=int(config["environment"]["cpus"]),
        max_staleness=bound,
        group_size=round(counted[0]["rollouts"] / counted[0]["groups"]),
        prompts_per_step=int(counted[0]["groups"]),
        micro_batch_tokens=_knob(nodes[trainer], "micro_batch_tokens", 0),
        calls_at_once={
            name: _knob(node, "concurrency", 1) * _knob(node, "processes", 1)
            for name, node in nodes.items()
        },
        scorers={name for name, node in nodes.items() if node["operator"] == "Scorer"},
        prompt_tokens=prompt,
        lengths=lengths,
        stretches=stretches,
        steps=counted,
        in_turn=config.get("turns", ()),
    )


def _knob(node: Mapping[str, Any], name: str, otherwise: int) -> int:
    """A whole number that a node declares."""
    text = str(node.get("knobs", {}).get(name, ""))
    return int(text) if text.isdecimal() else otherwise


def _texts(folder: RunFolder, steps: Sequence[int]) -> tuple[float, Lengths, float]:
    """Mean tokens of a prompt; those of completions; mean number of turns."""
    prompts: list[NDArray[Any]] = []
    completions: list[NDArray[Any]] = []
    turns: list[int] = []
    for step in steps[:: max(1, len(steps) // _FILES)]:
        rows = folder.rollouts_of().read(step)
        whole = pc.list_value_length(rows.column(TOKENS)).to_numpy()
        drawn = np.array([sum(mask) for mask in rows.column(MASK).to_pylist()])
        prompts.append(whole - drawn)
        completions.append(drawn)
        if TURN in rows.column_names:
            turns += [1 + max(turn, default=0) for turn in rows.column(TURN).to_pylist()]
    turns_mean = float(np.mean(turns)) if turns else 1.0
    return (
        float(np.concatenate(prompts).mean()),
        Lengths.of(np.maximum(1, np.concatenate(completions))),
        turns_mean,
    )


def _worlds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By episode, the seconds of its world for a turn."""
    first, last = (lines[0]["nodes"], lines[-1]["nodes"]) if lines else ({}, {})
    world_s = {}
    for name, now in last.items():
        turns = now.get("turns", 0) - first.get(name, {}).get("turns", 0)
        if "world_s" in now and turns > 0:
            world_s[name] = (
                max(0.0, now["world_s"] - first.get(name, {}).get("world_s", 0.0)) / turns
            )
    return world_s


def _between(
    lines: Sequence[Mapping[str, Any]], trainer: str, first: int, last: int
) -> list[Mapping[str, Any]]:
    """Those at which the trainer had made so many steps."""
    return [
        line for line in lines if first <= line["nodes"].get(trainer, {}).get("step", -1) <= last
    ]


def _activity_spans(lines: Sequence[Mapping[str, Any]], node: str) -> list[ActivitySpan]:
    """Some six, as a count that is told of in whole steps is off by one at either end of each;
    where a count fell, a process began anew, and nothing is known.
    """
    samples = [line for line in lines if node in line["nodes"]]
    bounds = (
        [samples[at * (len(samples) - 1) // _STRETCHES] for at in range(_STRETCHES + 1)]
        if samples
        else []
    )
    spans = []
    for before, after in itertools.pairwise(bounds):
        then, now = before["nodes"], after["nodes"]

        def spent(name: str, key: str, then: Any = then, now: Any = now) -> float:
            return float(now[name].get(key, 0)) - float(then.get(name, {}).get(key, 0))

        measured = spent(node, "measured") / max(1, now[node].get("replicas", 1))
        span = ActivitySpan(
            seconds=measured or after["seconds"] - before["seconds"],
            busy_s=spent(node, "busy"),
            beside_s=spent(node, "beside"),
            steps=spent(node, "decode_steps") + spent(node, "step"),
            tokens=spent(node, "tokens"),
            looked=spent(node, "looked"),
            rows_in=spent(node, "rows_in"),
            rows_out=spent(node, "rows_out"),
            decoded=tuple(
                Decoded(
                    **{
                        name: spent(node, f"decode_{size}_{key}")
                        for name, key in _OF_A_SIZE.items()
                    }
                )
                for size in sorted(
                    {key.split("_")[1] for key in now[node] if _SIZE.fullmatch(key)}, key=int
                )
            ),
        )
        if span.seconds > 0 and min(span.busy_s, span.steps, span.rows_in, span.rows_out) >= 0:
            spans.append(span)
    return spans
