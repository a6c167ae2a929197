"""How long a replica takes to carry its rollouts on until something happens that others notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from dataflow.foresight.simulation.groups import SimulatedGroup
from dataflow.foresight.simulation.scenario import GeneratorCosts

Ending = tuple[int, int, SimulatedGroup, float, Sequence[int]]
"""A live rollout: the stride at which its turn ends, its number, its group, the tokens that it
would have had at stride 0, strides of the turns that are to come."""
Stretch = tuple[float, int, int, float, float]
"""Decode steps with as many rollouts: the clock at its end; how many rollouts have ended by then,
and strides are made; seconds of other work before them, and of all."""


@cache
def turns_of(strides: int, turns: int) -> tuple[int, ...]:
    """So many strides in turns of like length, of one at least.

    >>> turns_of(7, 3), turns_of(1, 2)
    ((3, 2, 2), (1, 1))
    """
    if turns == 1:
        return (max(strides, 1),)
    share, more = divmod(max(strides, turns), turns)
    return tuple(share + (at < more) for at in range(turns))


def carried_on(
    ends: Sequence[Ending],
    costs: GeneratorCosts,
    step_s: Sequence[float],
    stride: int,
    *,
    at: int,
    now: float,
    owed_s: float,
    looks_back: float,
    linger: int,
    until: int | None,
    few: int,
    stops: Callable[[int], bool] | None,
) -> list[Stretch]:
    """The stretches, one or more, until groups may leave, a turn is to be answered, whoever waits
    may start, or nobody is left.

    ends: in the order in which they end. step_s: as `costs` has it. at: strides that are made.
    owed_s: what the first step waits for. looks_back: tokens of all at stride 0. linger: strides
    after which a complete group leaves. until: the stride at which one that is complete does, None
    where none is. few: complete groups that leave at once. stops: whether it stops once so many
    rollouts have ended."""
    found: list[Stretch] = []
    ended, many, context_s = 0, len(ends), costs.context_s
    target = ends[0][0]
    while True:
        if until is not None and until < target:
            target = until
        live, before = many - ended, ended
        steps = (target - at) * stride
        seconds = owed_s + steps * (
            step_s[live] + context_s * (looks_back + live * (at * stride + steps / 2))
        )
        now += seconds
        at, is_over = target, target == until
        while ended < many:
            end, _, group, base, turns = ends[ended]
            if end > target:
                target = end
                break
            ended += 1
            looks_back -= base
            if turns:
                is_over = True
            elif group.last <= at:
                # as far as its rollouts are live; if it is not complete, there was no need to stop
                few -= 1
                if until is None:
                    until = at + linger
        found.append((now, ended, at, owed_s, seconds))
        if is_over or few <= 0 or ended == many or (stops is not None and stops(ended)):
            return found
        owed_s = costs.rollout_s * (ended - before)
