"""Rewards, penalties and their sum, and `find`, which turns what a user typed into a scorer."""

from __future__ import annotations

from typing import Any

from dataflow.errors import GraphError, nearest
from dataflow.scorer import FORMS, Scorer, scorer
from dataflow.system.modules import named
from operators.rewards.code import code_reward
from operators.rewards.foreign import (
    from_areal,
    from_openrlhf,
    from_slime,
    from_trl,
    from_verifiers,
    from_verl,
)
from operators.rewards.judge_model import Judge
from operators.rewards.match import exact, math_verify, number
from operators.rewards.shaping import combine, kl_penalty, overlong

__all__ = [
    "KNOWN",
    "Judge",
    "code_reward",
    "combine",
    "exact",
    "find",
    "from_areal",
    "from_openrlhf",
    "from_slime",
    "from_trl",
    "from_verifiers",
    "from_verl",
    "kl_penalty",
    "math_verify",
    "number",
    "overlong",
]
FORMS.update(
    trl=from_trl,
    verl=from_verl,
    verifiers=from_verifiers,
    openrlhf=from_openrlhf,
    slime=from_slime,
    areal=from_areal,
)
KNOWN: dict[str, Scorer[..., Any]] = {
    "exact": scorer(name="reward")(exact),
    "number": scorer(name="reward")(number),
    "math_verify": math_verify.renamed("reward"),
    "code": code_reward(),
}


def find(text: str) -> Scorer[..., Any]:
    """The reward that a text names, as column `reward`.

    `exact`, `number`, `math_verify` or `code`; a function of one's own as
    `path/to/file.py:function` or `package.module:function`; with the name of a system in front one
    that was written for that system, unchanged: `trl:my_rewards.py:accuracy`,
    `verl:verl.utils.reward_score:default_compute_score` (`dataflow.scorer.FORMS`). Raises
    GraphError when there is none.

    >>> reward = find("number")
    >>> reward.name, reward("so it is 1,200.", "#### 1200")
    ('reward', 1.0)
    """
    if text in KNOWN:
        return KNOWN[text]
    system, colon, place = text.partition(":")
    if colon and system in FORMS:
        reward: Scorer[..., Any] = FORMS[system](named(place, text, "reward"))
        return reward
    path, colon, _ = text.rpartition(":")
    if not colon or not (
        path.endswith(".py") or all(part.isidentifier() for part in path.split("."))
    ):
        raise GraphError(
            f"no reward is called {text!r}, only {list(KNOWN)}{nearest(text, KNOWN)}; give one of"
            " these, or a function of your own as path/to/file.py:function, with one of"
            f" {[f'{form}:' for form in FORMS]} in front where it was written for that system"
        )
    function = named(text, text, "reward")
    return (
        function.renamed("reward")
        if isinstance(function, Scorer)
        else scorer(name="reward")(function)
    )
