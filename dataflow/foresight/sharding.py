"""Seconds in which a trainer's ranks wait for what others of them hold: parameters that are
gathered while they are needed, gradients that are added up (FSDP; with several copies of the model,
HSDP).
"""

from __future__ import annotations

from dataflow.foresight.rates import Rates
from dataflow.foresight.training import Learners

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
