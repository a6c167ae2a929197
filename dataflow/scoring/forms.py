"""Adapters for functions written for other systems, by the name before a reference."""

from collections.abc import Callable
from typing import Any

from dataflow.errors import GraphError, nearest

FORMS: dict[str, Callable[[Any], Any]] = {}
"""By name: from such a function to a scorer. `operators.rewards` puts its own here when it is
imported."""


def split_form(reference: str) -> tuple[str, str]:
    """The form that a reference names, and the rest of it; no form where it has one colon or none.

    >>> split_form("trl:my_rewards:accuracy"), split_form("my_rewards:strict")
    (('trl', 'my_rewards:accuracy'), ('', 'my_rewards:strict'))
    """
    form, _, target = reference.partition(":")
    return (form, target) if ":" in target else ("", reference)


def adapt(form: str, loaded: Any) -> Any:
    """A loaded object as a scorer; unchanged where no form is named. GraphError for an unknown
    form.
    """
    if not form:
        return loaded
    if form not in FORMS:
        raise GraphError(
            f"no form of rewards is called '{form}', only {list(FORMS)}{nearest(form, FORMS)}; name"
            " one of these, and import operators.rewards in the run's program"
        )
    return FORMS[form](loaded)
