"""Losses made of losses: a sum of two, KL to the reference, an entropy bonus, the trainer as its
own proximal policy.

What comes back is a loss like any other: it reads the columns of its parts, has the knobs of all of
them, takes more of them through functools.partial, and can be combined again. It is called by
parameter names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from dataflow.errors import GraphError, checked
from operators.losses.declared import loss
from operators.losses.per_rollout import MOST_LOG_RATIO, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

Loss: TypeAlias = Callable[..., Any]

PROXIMAL = "proximal_logprobs"


def plus(loss: Loss, term: Loss) -> Loss:
    """The sum of two losses. They share columns; GraphError for a knob that both have."""
    ours, theirs = inspect.signature(loss).parameters, inspect.signature(term).parameters
    for name in ours.keys() & theirs.keys():
        if any(
            parameters[name].default is not inspect.Parameter.empty for parameters in (ours, theirs)
        ):
            raise GraphError(
                f"losses '{_name(loss)}' and '{_name(term)}' both have '{name}', as a knob of one"
                " at least, so that a value for it could be meant for either; rename it in one of"
                " them"
            )

    def call(**arguments: Any) -> Any:
        return loss(**_only(ours, arguments)) + term(**_only(theirs, arguments))

    return _made(f"{_name(loss)}+{_name(term)}", call, {**ours, **theirs}, loss, term)


@checked
def with_kl(loss: Loss, beta: float = 0.04, *, corrected: bool = False) -> Loss:
    """The loss plus beta times the KL of the policy to a reference, as `plus` adds it; knob
    `kl_beta`.

    In the loss, which is GRPO's way (arXiv 2402.03300 eq. 3); in the reward it is
    `credit.token_rewards`. corrected: `corrected_kl` instead of `kl_to_reference`.
    """
    return plus(
        loss, functools.partial(corrected_kl if corrected else kl_to_reference, kl_beta=beta)
    )


@checked
def with_entropy(loss: Loss, weight: float = 0.001) -> Loss:
    """The loss minus weight times the entropy: `plus(loss, entropy_bonus)`; knob
    `entropy_weight`.
    """
    return plus(loss, functools.partial(entropy_bonus, entropy_weight=weight))


def one_update(loss: Loss) -> Loss:
    """The loss with the trainer's own log-probabilities, held constant, as its `proximal_logprobs`.

    For a trainer that makes one update per rollout, these are those of the policy before the
    update: no operator has to compute them, the ratio new / proximal is 1, and clipping never acts.
    GraphError for a loss that reads none.
    """
    parameters = dict(inspect.signature(loss).parameters)
    if parameters.pop(PROXIMAL, None) is None:
        raise GraphError(
            f"loss '{_name(loss)}' reads {list(parameters)} and no '{PROXIMAL}', so there is"
            " nothing to put in its place; give it as it is"
        )

    def call(**arguments: Any) -> Any:
        return loss(**arguments, **{PROXIMAL: arguments["new_logprobs"].detach()})

    return _made(_name(loss), call, parameters, loss)


@loss
def kl_to_reference(new_logprobs: Tensor, ref_logprobs: Tensor, kl_beta: float = 0.04) -> Tensor:
    """kl_beta times the estimate  r - 1 - log r,  r = ref / pi,  of KL(pi || reference) (k3; arXiv
    2402.03300 eq. 4).

    Never negative, and unbiased as a value where tokens are drawn from pi; its gradient is  (1 - r)
    * grad log pi, which is that of the reverse KL only near the reference. Assumes `ref_logprobs`
      at the temperature of sampling.
    """
    gap = (ref_logprobs - new_logprobs).clamp(max=MOST_LOG_RATIO)
    return kl_beta * (gap.exp() - gap - 1.0)


@loss
def corrected_kl(
    new_logprobs: Tensor, logprobs: Tensor, ref_logprobs: Tensor, kl_beta: float = 0.04
) -> Tensor:
    """kl_beta times  pi / mu * (r - 1 - log r) , the ratio with its gradient (DeepSeek-V3.2, arXiv
    2512.02556).

    Unbiased in value and in gradient, the reverse KL's, whatever policy mu drew the tokens. The
    ratio is not bounded.
    """
    return ratio_of(new_logprobs - logprobs) * kl_to_reference(new_logprobs, ref_logprobs, kl_beta)


@loss
def entropy_bonus(entropy: Tensor, entropy_weight: float = 0.001) -> Tensor:
    """Minus entropy_weight times the entropy of the policy at each token, in nats (arXiv
    1602.01783).
    """
    return -entropy_weight * entropy


class _Made:
    """A loss made of others, with the signature that it shows."""

    def __init__(
        self, name: str, call: Loss, parameters: Iterable[inspect.Parameter], of: Loss
    ) -> None:
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [
            parameter.replace(kind=keyword)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            else parameter
            for parameter in parameters
        ]
        self.__name__ = name
        self.__wrapped__ = of
        self.__signature__ = inspect.Signature(sorted(named, key=lambda parameter: parameter.kind))
        self._call = call

    def __call__(self, **arguments: Any) -> Any:
        return self._call(**arguments)


def _made(name: str, call: Loss, parameters: dict[str, inspect.Parameter], *parts: Loss) -> Loss:
    """A loss with these parameters; knobs that were set in its parts stay visible as set."""
    combined = _Made(name, call, parameters.values(), _function(parts[0]))
    return functools.partial(
        combined, **{knob: value for part in parts for knob, value in _set(part).items()}
    )


def _function(loss: Loss) -> Loss:
    return _function(loss.func) if isinstance(loss, functools.partial) else loss


def _set(loss: Loss) -> dict[str, Any]:
    return dict(loss.keywords) if isinstance(loss, functools.partial) else {}


def _name(loss: Loss) -> str:
    return str(getattr(_function(loss), "__name__", type(loss).__name__))


def _only(parameters: Iterable[str], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in parameters if name in arguments}
