"""The losses a second time: objectives as their papers write them, in plain loops over ragged
rollouts, in float64.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOKEN_COLUMNS = (
    "new_logprobs",
    "logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "proximal_logprobs",
    "entropy",
    "new_values",
    "values",
    "advantage",
)
WITH_GRADIENT = ("new_logprobs", "entropy", "new_values")


@dataclass
class Rollout:
    """One rollout: numbers per token, prompt and all; what stands at unmarked tokens must not
    matter.
    """

    group: int
    mask: list[bool]
    reward: float
    numbers: dict[str, list[float]] = field(default_factory=dict)
    leaves: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def chosen(self) -> list[int]:
        return [at for at, marked in enumerate(self.mask) if marked]

    def at(self, name: str, token: int) -> Tensor:
        return self.leaves[name][token]

    def number(self, name: str, token: int) -> float:
        """Without gradient."""
        return self.leaves[name][token].item() if name in self.leaves else self.numbers[name][token]


def draw(seed: int, *, per_token: bool = False) -> list[Rollout]:
    """Three groups of two to four rollouts; ratios near 1 and far from it, some rewards and
    advantages equal.

    per_token: advantages differ within a rollout.
    """
    noise = random.Random(seed)
    whole = noise.randint

    def normal(scale: float) -> float:
        return noise.gauss(0.0, scale)

    rollouts = []
    for group in range(3):
        for _ in range(whole(2, 4)):
            mask = [False] * whole(1, 3) + [whole(0, 3) > 0 for _ in range(whole(1, 7))] + [True]
            reward, advantage, spread = (
                float(whole(0, 3)),
                normal(1.0),
                (0.01, 0.2, 1.5)[whole(0, 2)],
            )
            rollout = Rollout(group, mask, reward)
            columns: dict[str, list[float]] = {name: [] for name in TOKEN_COLUMNS}
            for _ in mask:
                old = -abs(normal(1.5)) - 0.1
                numbers = {
                    "logprobs": old,
                    "new_logprobs": old + normal(spread),
                    "ref_logprobs": old + normal(0.5),
                    "teacher_logprobs": old + normal(1.0),
                    "proximal_logprobs": old + normal(spread),
                    "entropy": abs(normal(1.0)),
                    "values": normal(0.5),
                    "new_values": normal(0.7),
                    "advantage": normal(1.0) if per_token else advantage,
                }
                for name, number in numbers.items():
                    columns[name].append(number)
            for name in WITH_GRADIENT:
                leaves = [torch.tensor(number, dtype=torch.float64) for number in columns.pop(name)]
                rollout.leaves[name] = [leaf.requires_grad_() for leaf in leaves]
            rollout.numbers = columns
            rollouts.append(rollout)
    return rollouts


def flat(rollouts: list[Rollout], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What the trainer gives a loss: the marked tokens of all rollouts, end to end."""
    given = {
        name: torch.tensor([r.number(name, t) for r in rollouts for t in r.chosen], dtype=dtype)
        for name in TOKEN_COLUMNS
    }
    for name in WITH_GRADIENT:
        given[name].requires_grad_()
    index = [(number, r.group, r.reward) for number, r in enumerate(rollouts) for _ in r.chosen]
    given["rollout_index"], given["group_index"] = (
        torch.tensor([each[at] for each in index]) for at in (0, 1)
    )
    given["reward"] = torch.tensor([reward for *_, reward in index], dtype=dtype)
    given["mask"] = torch.ones(len(index), dtype=torch.bool)
    return given


def reduced(losses_T: Tensor, rollouts: list[Rollout], normalize: str) -> Tensor:
    """What the trainer makes of a number per token."""
    lengths = [len(rollout.chosen) for rollout in rollouts]
    divisors = {
        "tokens": [sum(lengths)] * len(lengths),
        "rollouts": [len(lengths)] * len(lengths),
        "rollout_means": [len(lengths) * length for length in lengths],
    }[normalize]
    scale = [
        1.0 / divisor
        for divisor, length in zip(divisors, lengths, strict=True)
        for _ in range(length)
    ]
    return (losses_T * torch.tensor(scale, dtype=losses_T.dtype)).sum()


Term = Callable[[Rollout, int], Tensor]


def token_mean(rollouts: list[Rollout], term: Term) -> Tensor:
    terms = [term(r, t) for r in rollouts for t in r.chosen]
    return _sum(terms) / len(terms)


def mean_of_sums(rollouts: list[Rollout], term: Term) -> Tensor:
    return _sum(term(r, t) for r in rollouts for t in r.chosen) / len(rollouts)


def mean_of_means(rollouts: list[Rollout], term: Term) -> Tensor:
    return _sum(_sum(term(r, t) for t in r.chosen) / len(r.chosen) for r in rollouts) / len(
        rollouts
    )


def _sum(terms: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + term
    return total


def _clip_objective(ratio: Tensor, push: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r) A) by cases."""
    if ratio > 1 + high and push > 0:
        return ratio * 0 + (1 + high) * push
    if ratio < 1 - low and push < 0:
        return ratio * 0 + (1 - low) * push
    return ratio * push


def _push(r: Rollout, t: int) -> float:
    return r.number("advantage", t)


def _ratio(r: Rollout, t: int, below: str = "logprobs") -> Tensor:
    return torch.exp(r.at("new_logprobs", t) - r.number(below, t))


def _engine_gap(r: Rollout, t: int) -> float:
    return r.number("proximal_logprobs", t) - r.number("logprobs", t)


def aipo(rollouts: list[Rollout], rho: float) -> Tensor:
    return token_mean(
        rollouts,
        lambda r, t: -min(_ratio(r, t).item(), rho) * _push(r, t) * r.at("new_logprobs", t),
    )


def aipo_surrogate(rollouts: list[Rollout], rho: float) -> Tensor:
    def term(r: Rollout, t: int) -> Tensor:
        ratio = _ratio(r, t)
        return -(ratio if ratio <= rho else 0 * ratio + rho) * _push(r, t)

    return token_mean(rollouts, term)


def cispo(rollouts: list[Rollout], low: float, high: float) -> Tensor:
    def term(r: Rollout, t: int) -> Tensor:
        weight = max(1 - low, min(1 + high, _ratio(r, t).item()))
        return -weight * _push(r, t) * r.at("new_logprobs", t)

    return token_mean(rollouts, term)


def clipped_term(low: float, high: float) -> Term:
    return lambda r, t: -_clip_objective(_ratio(r, t), _push(r, t), low, high)


def with_terms(term: Term, *, beta: float = 0.0, weight: float = 0.0) -> Term:
    """A loss's term with a KL penalty to the reference and an entropy bonus."""

    def both(r: Rollout, t: int) -> Tensor:
        odds = torch.exp(r.number("ref_logprobs", t) - r.at("new_logprobs", t))
        return term(r, t) + beta * (odds - 1 - torch.log(odds)) - weight * r.at("entropy", t)

    return both


def gspo(rollouts: list[Rollout], low: float, high: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for r in rollouts:
        likelihood = _sum(r.at("new_logprobs", t) - r.number("logprobs", t) for t in r.chosen)
        ratio = torch.exp(likelihood) ** (1 / len(r.chosen))
        total = total - _clip_objective(ratio, _push(r, r.chosen[0]), low, high)
    return total / len(rollouts)


def weighted_clip(
    rollouts: list[Rollout], weight: Callable[[Rollout, int], float], low: float, high: float
) -> Tensor:
    return token_mean(
        rollouts,
        lambda r, t: (
            -weight(r, t)
            * _clip_objective(_ratio(r, t, "proximal_logprobs"), _push(r, t), low, high)
        ),
    )


def decoupled_weight(r: Rollout, t: int) -> float:
    return math.exp(_engine_gap(r, t))


def truncated_weight(cap: float) -> Callable[[Rollout, int], float]:
    return lambda r, t: min(cap, math.exp(_engine_gap(r, t)))


def sequence_weight(cap: float) -> Callable[[Rollout, int], float]:
    return lambda r, t: min(cap, math.prod(math.exp(_engine_gap(r, each)) for each in r.chosen))


def masked_weight(least: float, most: float) -> Callable[[Rollout, int], float]:
    def weight(r: Rollout, t: int) -> float:
        ratio = math.exp(_engine_gap(r, t))
        return ratio if least <= ratio <= most else 0.0

    return weight


def value_error(clip: float | None) -> Term:
    def term(r: Rollout, t: int) -> Tensor:
        new, old = r.at("new_values", t), r.number("values", t)
        target = old + _push(r, t)
        free = (new - target) ** 2 / 2
        if clip is None:
            return free
        held = (
            new
            if abs(new.item() - old) < clip
            else new * 0 + old + math.copysign(clip, new.item() - old)
        )
        bounded = (held - target) ** 2 / 2
        return free if free >= bounded else bounded

    return term


def distill_term(rho: float) -> Term:
    def term(r: Rollout, t: int) -> Tensor:
        gain = r.number("teacher_logprobs", t) - r.number("new_logprobs", t)
        return -min(_ratio(r, t).item(), rho) * gain * r.at("new_logprobs", t)

    return term


def dpo(rollouts: list[Rollout], beta: float) -> Tensor:
    """Sum over groups of n_g / R times the pair's loss: the mean over groups where all are of one
    size.
    """
    total = torch.zeros((), dtype=torch.float64)
    for group in sorted({r.group for r in rollouts}):
        members = [r for r in rollouts if r.group == group]
        best, worst = members[0], members[0]
        for r in members[1:]:
            best = r if r.reward > best.reward else best
            worst = r if r.reward < worst.reward else worst
        if best.reward == worst.reward:
            continue
        margin_of = [
            _sum(r.at("new_logprobs", t) - r.number("ref_logprobs", t) for t in r.chosen)
            for r in (best, worst)
        ]
        loss = torch.log(1 + torch.exp(-beta * (margin_of[0] - margin_of[1])))
        total = total + len(members) / len(rollouts) * loss
    return total
