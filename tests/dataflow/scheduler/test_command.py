"""What the scheduler answers to somebody who is no worker: commands, and anything else."""

from typing import Any

import pytest

from dataflow.errors import GraphError
from dataflow.scheduler.commands import answer


def said(message: Any, stopped: list[bool] | None = None) -> dict[str, Any]:
    def scale(wishes: Any) -> dict[str, dict[str, int]]:
        if "nobody" in wishes:
            raise GraphError("no such node")
        return {node: {"live": count} for node, count in wishes.items()}

    return answer(message, scale, lambda: {"step": 7}, lambda: ([] if stopped is None else stopped).append(True))


def test_a_wish_is_passed_on_and_facts_are_told() -> None:
    assert said({"kind": "scale", "wishes": {"generator": 2}}) == {"replicas": {"generator": {"live": 2}}}
    assert said({"kind": "facts"}) == {"facts": {"step": 7}}


def test_who_asks_a_run_to_stop_is_told_that_it_will() -> None:
    stopped: list[bool] = []
    assert said({"kind": "stop"}, stopped) == {"stops": True} and stopped == [True]


def test_a_refusal_is_answered_with_its_reason() -> None:
    assert said({"kind": "scale", "wishes": {"nobody": 2}}) == {"error": "no such node"}


JUNK: list[Any] = [
    None, 7, b"\x00", "facts", [], {}, {"kind": "facts?"}, {"kind": ["facts"]}, {"kind": "scale"},
    {"wishes": {"a": 1}}, {"kind": "scale", "wishes": {"a": True}}, {"kind": "scale", "wishes": {7: 1}},
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK)
def test_anything_else_is_answered_with_what_a_command_is(junk: Any) -> None:
    assert said(junk)["error"].startswith("a command is a map of nodes and whole numbers, but the run got ")
