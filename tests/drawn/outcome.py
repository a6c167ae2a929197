"""What comes of a drawn graph: where it is drawn, and in one process, on one rank of everything."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from refused.page import EVIDENT, PAGE, rows

from dataflow import GraphError, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.planning.hosts import Devices
from dataflow.runner import Result, make_plan

from .draw import STEPS, Computes, Drawn


@dataclass(frozen=True)
class RunFigures:
    """Of the steps of a run."""

    losses: list[float]
    grad_norms: list[float]
    rollouts: list[tuple[int, int, list[int], list[float], list[int]]]
    """(group, position, tokens, logprobs, versions), in order."""
    mismatches: list[float]
    """Between what the generator said of its tokens and what the trainer finds, by step."""
    verdict: str
    """Empty where `dataflow verify` has nothing to say."""

    @classmethod
    def of(cls, result: Result) -> RunFigures:
        """Read from the run's folder."""
        steps = [line for line in result.metrics if "loss" in line]
        rollouts = []
        for step in range(1, STEPS + 1):
            table = RunFolder.open(result.folder).rollouts_of().read(step)
            columns = ("group_id", "position", "tokens", "logprobs", "versions")
            rollouts += list(
                zip(*(table.column(name).to_pylist() for name in columns), strict=True)
            )
        return cls(
            losses=[line["loss"] for line in steps],
            grad_norms=[line["grad_norm"] for line in steps],
            rollouts=sorted(rollouts),
            mismatches=[line["mismatch"] for line in steps],
            verdict="" if result.verdict.clean else result.verdict.line,
        )


@dataclass(frozen=True)
class DrawnRuns:
    """Runs drawn graphs around one policy."""

    policy: Path
    runs: Path
    one_rank: dict[Computes, RunFigures] = field(default_factory=dict)

    def drawn(self, drawn: Drawn) -> RunFigures:
        """Where it is drawn."""
        return self._run(drawn.graph(self.policy), **drawn.how())

    def on_one_rank(self, computes: Computes) -> RunFigures:
        """In one process; once for all draws that compute the same."""
        if computes not in self.one_rank:
            self.one_rank[computes] = self._run(
                Drawn(computes=computes).graph(self.policy), on=inline()
            )
        return self.one_rank[computes]

    def refusal(self, drawn: Drawn) -> str:
        """Why a graph is refused by its knobs, its check or its plan; empty where it is
        accepted.
        """
        try:
            make_plan(drawn.graph(self.policy), devices=Devices(cpus=1), steps=STEPS, **drawn.how())
        except GraphError as error:
            return str(error)
        return ""

    def _run(self, graph: object, **how: object) -> RunFigures:
        number = len(list(self.runs.iterdir()))
        return RunFigures.of(
            run(graph, steps=STEPS, seed=1, runs=self.runs / str(number), quiet=True, **how)
        )  # type: ignore


def listed(message: str) -> bool:
    """Whether docs/refused.md, or the list of evident refusals, has the line of this one."""
    heads = (*rows(PAGE.read_text("utf-8")), *EVIDENT)
    return any(
        re.fullmatch(re.escape(head).replace("…", ".*"), message.partition("; ")[0])
        for head in heads
    )
