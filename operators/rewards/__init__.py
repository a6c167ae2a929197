"""Rewards, penalties and their sum, and `find`, which turns what a user typed into a scorer."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError
from dataflow.graph import nearest
from dataflow.scorer import Scorer, scorer
from operators.rewards.code import code_reward
from operators.rewards.combining import combine
from operators.rewards.match import exact, number
from operators.rewards.shaping import kl_penalty, overlong

__all__ = ["KNOWN", "code_reward", "combine", "exact", "find", "kl_penalty", "number", "overlong"]

KNOWN: dict[str, Scorer[..., Any]] = {
    "exact": scorer(name="reward")(exact),
    "number": scorer(name="reward")(number),
    "code": code_reward(),
}


def find(text: str) -> Scorer[..., Any]:
    """The reward called `exact` or `number`, or the function in `path/to/file.py:function`, as column `reward`.

    Raises GraphError when there is none.

    >>> reward = find("number")
    >>> reward.name, reward("so it is 1,200.", "#### 1200")
    ('reward', 1.0)
    """
    if text in KNOWN:
        return KNOWN[text]
    path, colon, function = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise GraphError(
            f"no reward is called {text!r}, only {list(KNOWN)}{nearest(text, KNOWN)}; "
            f"give one of these, or a function of your own as path/to/file.py:function"
        )
    if not Path(path).is_file():
        raise GraphError(f"the reward {text!r} names a file that is not there; check the path {path!r}")
    found = getattr(_load(Path(path)), function, None)
    if found is None:
        raise GraphError(f"{path} has no function {function!r}; define it there, or name another")
    return found.renamed("reward") if isinstance(found, Scorer) else scorer(name="reward")(found)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GraphError(f"{path} cannot be imported: {type(error).__name__}: {error}; mend the file") from error
    return module
