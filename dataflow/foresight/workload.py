"""What nobody can know of a run before it: how long texts are, what a scorer takes, what a filter
drops; and what is supposed of it that this engine does not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.errors import GraphError, nearest
from dataflow.foresight.lengths import Lengths
from dataflow.node import Generate, Operator
from dataflow.structure import Structure

PROMPT_TOKENS, SIGMA = 200.0, 0.8
_CUT = 0.25
"""Mean length of completions over the most that they may have, where nobody says."""
_NAMES = {
    "mean": "mean_tokens",
    "prompt": "prompt_tokens",
    "sigma": "sigma",
    "computed": "computed",
}
_OF_NODE = {"seconds": "row_s", "drops": "drops", "turns": "turns", "world": "world_s"}
CUTS = ("pipeline", "context", "expert")
"""Ways to cut a model over ranks that this engine does not run."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens, seconds and shares."""

    prompt_tokens: float = PROMPT_TOKENS
    mean_tokens: float | None = None
    """Of a completion; None: a quarter of the most that it may have."""
    sigma: float = SIGMA
    """Of the logarithm of their number."""
    run_lengths: Lengths | None = None
    """Those of a run, in place of a mean and a sigma."""
    computed: float | None = None
    """Tokens that a trainer passes over, of all tokens; siblings that begin alike share what they
    have in common. None: as the constants have it."""
    row_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a row, by operator."""
    drops: Mapping[str, float] = field(default_factory=dict)
    """Share of groups that an operator gives up."""
    turns: Mapping[str, float] = field(default_factory=dict)
    """Of the policy in one rollout, by episode."""
    world_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the world takes between two turns, by episode."""
    cuts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By operator, over how many ranks its model is supposed to be cut, each of `CUTS`."""

    def lengths(self, generator: Operator, turns: int = 1) -> Lengths:
        """Of completions, in so many turns together. GraphError where they cannot be."""
        longest, mean = generator.traits.sampling.max_tokens, self.mean_tokens
        if longest is None:
            raise GraphError(
                f"'{generator.name}' does not say how long completions may be; set its max_tokens"
            )
        longest *= turns
        if self.run_lengths is not None:
            return Lengths.of(self.run_lengths.tokens.clip(1, longest))
        mean = max(1.0, _CUT * longest) if mean is None else mean
        if not 1 <= mean <= longest:
            raise GraphError(
                f"completions of '{generator.name}' are to have {mean:,.0f} tokens in the mean, but"
                f" have {longest:,} at most; foresee with fewer, or raise its max_tokens"
            )
        return Lengths.drawn(mean, longest, self.sigma) if mean < longest else Lengths.of([mean])

    def check(self, graph: Structure) -> None:
        """GraphError for an operator that the graph does not have."""
        for name in (*self.row_s, *self.drops, *self.turns, *self.world_s, *self.cuts):
            if name not in graph.operators:
                hint = nearest(name, graph.operators) or f"; it has {sorted(graph.operators)}"
                raise GraphError(
                    f"a workload tells of '{name}', which graph '{graph.name}' does not have{hint}"
                )
        for name in (*self.turns, *self.world_s):
            operator = graph.operators[name]
            if not isinstance(operator, Generate) or operator.asks is None:
                raise GraphError(
                    f"a workload tells of turns of '{name}', which is no episode; say it of one, or"
                    " leave it out"
                )
        for name, cut in self.cuts.items():
            operator = graph.operators[name]
            allowed = (
                CUTS if operator.trains else CUTS[:1] if isinstance(operator, Generate) else ()
            )
            if unknown := sorted(set(cut) - set(allowed)):
                knowable = ", ".join(allowed) or "nothing"
                raise GraphError(
                    f"'{name}' is supposed to be cut by {', '.join(unknown)}, of which no cost is"
                    f" known; of it {knowable} can be supposed"
                )


def read_workload(text: str) -> Workload:
    """`mean=800,prompt=200,sigma=0.8,reward.seconds=0.05,reward.drops=0.3,guess.turns=4,guess.world=2,trainer.pipeline=4`;
    tokens, seconds of a row, share of groups, turns of an episode, seconds between two of them,
    ranks.

    GraphError for what cannot be read.

    >>> read_workload("mean=800,judge.seconds=2").row_s
    {'judge': 2.0}
    """
    numbers: dict[str, float] = {}
    of_node: dict[str, dict[str, float]] = {name: {} for name in _OF_NODE.values()}
    cuts: dict[str, dict[str, int]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:([\w-]+)\.)?(\w+)\s*=\s*([-+.\w]+)", part)
        try:
            if match is None:
                raise ValueError(part)
            node, name, number = match[1], match[2], float(match[3])
            if node is None:
                numbers[_NAMES[name]] = number
            elif name in CUTS:
                cuts.setdefault(node, {})[name] = int(match[3])
            else:
                of_node[_OF_NODE[name]][node] = number
        except (KeyError, ValueError):
            raise GraphError(
                f"a workload to foresee with is {text!r}, which cannot be read at {part!r}; write"
                " it as mean=800,"
                f"prompt={PROMPT_TOKENS:g},sigma={SIGMA:g},reward.seconds=0.05,reward.drops=0.3"
            ) from None
        if not (name in (*CUTS, "turns")) <= number < float("inf") or (
            name == "drops" and number >= 1
        ):
            least = (
                "a share below 1"
                if name == "drops"
                else "1 or more"
                if name in (*CUTS, "turns")
                else "0 or more"
            )
            raise GraphError(
                f"a workload to foresee with is {text!r}, but {part!r} cannot be; give {least}"
            )
    return Workload(**numbers, **of_node, cuts=cuts)  # type: ignore[arg-type]
