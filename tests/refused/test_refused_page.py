"""docs/refused.md lists what the code refuses, all of it and nothing else, each with its reason."""

import ast

import pytest

from .code import PARTS, RAISED, ROOT, messages, refusals
from .page import PAGE, lacks, row, rows, written

ROOMS = (
    "dataflow/planning",
    "operators/engine",
    "operators/training",
    "operators/models",
    "operators/forward_pass",
)
ELSEWHERE = {
    "operators/engine/cuda/paged_attention.py",
    "operators/engine/native/attention.py",
    "operators/engine/native/fused.py",  # kernels, which only the engine calls
    "operators/engine/parking.py",
    "operators/engine/stop_strings.py",  # requests
    "operators/training/journal.py",  # `check` says it first
    "operators/training/retrain.py",  # a replay
}
"""Files of these rooms that raise such errors where they refuse no graph, plan or model."""


def test_the_page_lists_every_refusal_with_its_reason_and_no_other():
    assert not (left := lacks(PAGE.read_text("utf-8"), refusals())), "\n".join(left)


def test_the_page_is_as_it_is_written_from_the_code():
    page = PAGE.read_text("utf-8")
    assert written(page, refusals()) == page, "run python -m tests.refused"


def test_no_file_that_refuses_is_overlooked():
    looked = {path for places in PARTS.values() for place in places for path in ROOT.glob(place)}
    assert all(list(ROOT.glob(place)) for places in PARTS.values() for place in places)
    refuse = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path not in looked
        and any(f"raise {error}(" in path.read_text("utf-8") for error in RAISED)
    }
    assert refuse == ELSEWHERE, "name it in PARTS of tests/refused/code.py, or here"


@pytest.fixture
def refused() -> dict[str, dict[str, str]]:
    return {"Graphs": {"'…' is | and *": "a.py", "b": "b.py"}, "Devices": {"c": "c.py"}}


def test_a_page_is_read_as_it_was_written(refused):
    page = written("# T\n\nText.\n\n## Graphs\n" + row("b", "as so") + row("gone", "why"), refused)
    assert rows(page) == {"'…' is | and *": "", "b": "as so", "c": ""}
    assert written(page, refused) == page
    assert page.startswith("# T\n\nText.\n\n## Graphs\n\n- ") and "gone" not in page
    assert rows(written(page, refused, evident={"b"})) == {"'…' is | and *": "", "c": ""}


def test_what_a_page_lacks_is_said_by_its_line(refused):
    page = (
        "# T\n\n" + row("'…' is | and *", "why") + row("b", "") + row("gone", "why") + row("c", "w")
    )
    lines = lacks(page, refused, evident=())
    assert len(lines) == 2
    assert lines[0].endswith("delete its line: gone")
    assert lines[1].endswith("write it into the line: b")
    new = {"Graphs": {"new": "n.py"}}
    assert lacks(page, new)[0].startswith("n.py refuses what refused.md does not list;")
    listed = page.replace("gone", "new")
    assert not any(line.endswith("new") for line in lacks(listed, new, evident=()))
    (stale,) = lacks("# T\n", {}, evident={"old"})
    assert stale.endswith("delete its line: old")


def test_refusals_are_found_wherever_a_program_makes_them():
    program = '''
"""A docstring; it says nothing."""
CONSTANT = "one; two and three"
def faults(self):
    """Another; docstring."""
    found = [f"'{self.name}' needs {knob}; raise it" for knob in self.knobs]
    found.append("listed; do")
    yield (f"yielded {1}"
           f" twice; do")
    if found:
        raise GraphError(f"raised {found}" + more)
    raise WorkerDied(f"a worker; ended")
    head = "at the front"
    return f"{head} of it all; do"
def explain():
    return ["told; not refused"]
'''
    assert list(messages(ast.parse(program))) == [
        "'…' needs …; raise it",
        "listed; do",
        "yielded … twice; do",
        "raised ……",
        "… of it all; do",
    ]
