"""A change finds its code wherever that stands and however it is written, and refuses what it does
not fit.
"""

import ast
from pathlib import Path

import pytest

from .changes import (
    Change,
    always,
    argument,
    assigned,
    before,
    condition,
    default,
    expression,
    imports,
    instead,
    lacking,
    last,
    lengthened,
    never,
    returned,
    spelled,
    undecorated,
    unguarded,
    without,
)
from .law import Law

CODE = """
import functools

@functools.cache
def admit(room, *, limit):
    with lock():
        used = count(room)
        note(f"{room} of {limit}")
    if used < limit and room.open:
        return True
    for each in [one for one in room.doors if one.shut]:
        each.open(by=used)
    return used == 0
"""


def changed(tmp_path: Path, change: Change, symbol: str = "house:admit", code: str = CODE) -> str:
    (tmp_path / "house" / "hall").mkdir(parents=True, exist_ok=True)
    (tmp_path / "house" / "hall" / "door.py").write_text(code)
    return Law("a law", "test_it", symbol, change, "a part").broken(tmp_path)[1]


@pytest.mark.parametrize(
    ("change", "gone", "came"),
    [
        (never("limit", "<"), "if used < limit", "if False:"),
        (always("shut"), "if one.shut", "if True"),
        (
            condition("not (_)", "used", "limit"),
            "if used < limit",
            "if not (used < limit and room.open):",
        ),
        (lacking("room", "open"), "and room.open", "used < limit"),
        (without("note"), "note(", "pass"),
        (without("doors"), "each.open", "pass"),
        (instead("if room:\n    _", "note"), "", "if room:\n            note"),
        (before("print(room)", "note"), "", "print(room)\n        note"),
        (last("count"), "", "note(f'{room} of {limit}')\n        used = count(room)"),
        (unguarded("lock"), "with lock", "\n    used = count(room)"),
        (returned("False", "=="), "used == 0", "return False"),
        (assigned("used", "_ + 1"), "", "used = count(room) + 1"),
        (argument("open", "by", "0"), "by=used", "by=0"),
        (argument("count", 0, "None"), "count(room)", "count(None)"),
        (default("limit", "8"), "limit):", "limit=8):"),
        (
            expression("max(_, 1)", "used", "==", kind=ast.Compare),
            "return used",
            "max(used == 0, 1)",
        ),
        (spelled(" of ", " from "), " of ", "{room} from {limit}"),
        (undecorated("cache"), "@functools.cache", "def admit"),
        (imports("pickle"), "", "import pickle"),
        (lengthened(3), "", "pass\npass\npass"),
    ],
)
def test_each_change_does_what_it_says_and_the_module_still_parses(
    tmp_path: Path, change: Change, gone: str, came: str
) -> None:
    made = changed(tmp_path, change)
    ast.parse(made)
    assert came in made
    assert not gone or gone not in made


def test_code_that_moves_or_is_written_in_another_way_is_still_found(tmp_path: Path) -> None:
    written = CODE.replace(
        "used < limit and room.open:", "(used < limit  # a word\n        and room.open):"
    )
    here, there = (
        changed(tmp_path / "a", never("limit", "<")),
        (tmp_path / "b", never("limit", "<")),
    )
    assert here == changed(*there, "house.hall:admit", written)


@pytest.mark.parametrize(
    ("change", "symbol", "words"),
    [
        (never("limit", "<"), "house:refuse", "'refuse' stands 0 times in house"),
        (never("limit", "<"), "garden:admit", "'admit' stands 0 times in garden"),
        (never("capacity"), "house:admit", "0 conditions mention 'capacity'"),
        (without("used"), "house:admit", "4 statements mention 'used'"),
        (
            expression("_", "limit", "<", kind=ast.Compare),
            "house:admit",
            "the change changes nothing",
        ),
    ],
)
def test_what_is_gone_or_does_not_fit_any_more_is_refused_by_name(
    tmp_path: Path, change: Change, symbol: str, words: str
) -> None:
    with pytest.raises(ValueError, match=f"'a law' .a part., kept by {symbol}: .*{words}"):
        changed(tmp_path, change, symbol)


def test_a_name_that_stands_twice_is_refused_and_both_places_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"stands 2 times in house; found it in .*door.py:5.*door.py:.*name a room"
    ):
        changed(tmp_path, never("limit", "<"), code=CODE + CODE)
