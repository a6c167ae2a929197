"""Seconds of a trainer's step: passes over its tokens, and what its ranks exchange meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts
from dataflow.foresight.links import all_reduces
from dataflow.foresight.rates import Parts, Rates

BACKWARD = 2
"""Operations of a backward pass, in forward passes: a product for the inputs and one for the
weights."""
LAST = 1
"""Token of a rollout that a trainer does not pass over: nothing follows it."""
STATE_BYTES = 12
"""Of a parameter's optimizer: its value and Adam's two moments, in float32 (Rajbhandari et al.,
arXiv 1910.02054)."""
_GRADIENT_BYTES = 4
"""Summed over ranks in float32."""


@dataclass(frozen=True, kw_only=True)
class Learners:
    """All ranks of a trainer."""

    model: Counts
    kind: DeviceKind
    ranks: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    dtype: str = "bfloat16"
    adapters: float = 0.0
    """Numbers of those that are trained in place of all parameters; 0: there are none."""

    @property
    def replicas(self) -> float:
        """Ways in which a batch is dealt out."""
        return self.ranks / (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def trained(self) -> float:
        """Parameters that an update changes."""
        return self.adapters or float(self.model.parameters)

    @property
    def forward(self) -> float:
        """Forward passes that a forward and a backward pass come to: weights that are not trained
        need no product for their gradient.
        """
        return 1.0 + (BACKWARD / 2 if self.adapters else BACKWARD)

    def passes(self, rollouts: float, tokens: float, *, forward: float, sequences: float) -> Parts:
        """Over rollouts of so many tokens each; forward: forward passes that these operations come
        to.

        sequences: that are trained between two updates. A pipeline of p stages is idle for p - 1 of
        m + p - 1 turns (Huang et al., arXiv 1811.06965). Experts on other ranks are sent a token's
        hidden state and send it back, once for each expert (Lepikhin et al., arXiv 2006.16668).
        """
        total = rollouts * tokens
        operations = self.model.forward(total, tokens / 2) + 2 * self.adapters * total
        compute = operations / (self.ranks * self.kind.rate(self.dtype))
        turns = max(1.0, sequences / self.replicas)
        idle = (turns + self.pipeline_parallel - 1) / turns
        # tokens that go through a rank's layers, all of them
        own = total * self.tensor_parallel / self.ranks
        sums = all_reduces(self.model, self.kind, self.tensor_parallel, own)
        return Parts(compute=compute, links=sums + self._to_experts(total)) * (forward * idle)

    def micro_batches(self, tokens: float, most: int) -> int:
        """In which a rank passes over its share of so many tokens; most: of one, 0 where nobody
        says.
        """
        return max(1, math.ceil(tokens / self.replicas / most)) if most else 1

    def looks(self, tokens: float, back: float) -> float:
        """Numbers that a rank's attention looks at, in all layers; back: tokens that each of so
        many looks back at.
        """
        return tokens * back * self.model.mixing / self.ranks

    def channels(self, tokens: float) -> float:
        """Numbers in the hidden states of a rank's share of so many tokens, in all layers: what
        norms, activations and residuals read and write is in proportion to them.
        """
        return tokens * self.model.layers * self.model.width / self.ranks

    def update(self) -> Parts:
        """Adam reads weights, gradients and two moments and writes all but the gradients, four
        bytes each.
        """
        nbytes = 7 * 4 * self.trained / self.ranks
        return Parts(memory=nbytes / self.kind.memory_bytes_per_s)

    def sums(self) -> Parts:
        """The gradients of an update, over the replicas: by rings, in which each rank sends its own
        share twice.

        Over nodes, the links of all ranks of a node that sum the same share work at once.
        """
        kind, cut = self.kind, self.tensor_parallel * self.pipeline_parallel
        own = (self.model.parameters - self.model.experts) / cut
        own += self.model.experts / (self.expert_parallel * self.pipeline_parallel)
        own = self.adapters / cut if self.adapters else own
        nbytes = 2 * (1 - min(1.0, cut / self.ranks)) * _GRADIENT_BYTES * own
        alike = max(1, kind.per_node // self.tensor_parallel)
        over_nodes = min(kind.within_bytes_per_s, alike * kind.between_bytes_per_s)
        return Parts(
            links=nbytes / (over_nodes if self.ranks > kind.per_node else kind.within_bytes_per_s)
        )

    def _to_experts(self, tokens: float) -> float:
        """Seconds of a forward pass."""
        if not self.model.routed or self.expert_parallel == 1:
            return 0.0
        nbytes = (
            2 * tokens * self.model.routed * self.model.mixtures * self.model.width * 2 / self.ranks
        )
        if self.expert_parallel <= self.kind.per_node:
            return nbytes * (1 - 1 / self.expert_parallel) / self.kind.within_bytes_per_s
        return (
            nbytes * (1 - self.kind.per_node / self.expert_parallel) / self.kind.between_bytes_per_s
        )


# Seconds in which ranks wait for what others of them hold: parameters that are gathered while
# they are needed, gradients that are added up (FSDP; with several copies of the model, HSDP).

_GATHERED, _SCATTERED = 2 * 2, 4
"""Bytes of a parameter in a micro-batch: gathered in bfloat16 for the forward pass and for the
backward pass, its gradient scattered in float32."""


def exchanged_s(learners: Learners, copies: int, rates: Rates) -> float:
    """Of one micro-batch, forward and backward.

    Of n shards (n - 1) / n of the bytes come in over a ring (Rajbhandari et al., arXiv 1910.02054,
    section 7); over nodes all links of a node work at once, as each parameter enters it once.
    Copies then add up their shards' gradients, each rank those of its own shard: 2 (r - 1) / r of
    them leave it.
    """
    kind, own = learners.kind, learners.model.parameters / learners.tensor_parallel
    shards = learners.ranks // (learners.tensor_parallel * copies)
    near = kind.within_bytes_per_s
    far = min(near, kind.between_bytes_per_s * kind.per_node)
    of_a_copy = near if shards * learners.tensor_parallel <= kind.per_node else far
    between = near if learners.ranks <= kind.per_node else min(near, kind.between_bytes_per_s)
    gathered = (_GATHERED + _SCATTERED) * own * (shards - 1) / shards / of_a_copy
    added = 2 * (copies - 1) / copies * _SCATTERED * own / shards / between
    return (gathered + added) / rates.memory


def waits_s(
    learners: Learners,
    copies: int,
    rates: Rates,
    *,
    tokens: float,
    at_once: int,
    computing_s: float,
) -> float:
    """Of a step: what its exchanges take longer than the products beside which they go on.

    tokens: of the step. at_once: tokens of a micro-batch. computing_s: of all its passes.
    """
    passes = max(1.0, tokens / learners.replicas / at_once)
    return max(0.0, passes * exchanged_s(learners, copies, rates) - computing_s)
