"""Rewards, penalties and their sum, and `find`, which turns what a user typed into a scorer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError, nearest
from dataflow.scorer import FORMS, Scorer, scorer
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


def named(place: str, text: str, kind: str) -> Any:
    """What stands at a place. text: as the user typed it; kind: what is looked for, as messages
    call it.

    Raises GraphError where there is nothing.
    """
    path, _, name = place.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise GraphError(
                f"the {kind} {text!r} names a file that is not there; check the path {path!r}"
            )
        module = _loaded(Path(path))
    else:
        try:
            module = importlib.import_module(path)
        except Exception as error:
            raise GraphError(
                f"the {kind} {text!r} names module '{path}', which cannot be imported ({error}); "
                f"install it, or name a file as path/to/file.py:name"
            ) from error
    target = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise GraphError(f"{path} has no {kind} {name!r}; define it there, or name another")
    return target


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GraphError(
            f"{path} cannot be imported: {type(error).__name__}: {error}; mend the file"
        ) from error
    return module


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
