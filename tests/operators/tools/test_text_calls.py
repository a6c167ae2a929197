"""Laws of calls as plain text: what Python would write is read, anything else is broken and says
why.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from operators.chat.tool_calls import TextCalls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
        },
    }
]
CALLS = TextCalls(begin="[", end="]", result="<{}>")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text("ab'\"\\ (),", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("xy", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@examples(100)
@given(PLAIN, PLAIN)
def test_a_call_as_python_writes_it_is_read_with_its_values(a: object, b: object) -> None:
    read = TextCalls().format().read(f"so <call>add({a!r}, b={b!r})</call>", TOOLS)
    (call,) = read.message["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {
        "a": a,
        "b": b,
    }
    assert read.broken == () and read.message["content"] == "so"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[add(1]", "cannot be read"),
        ("[add 1, 2]", "cannot be read"),
        ("[1 + 2]", "is no name"),
        ("[add(open)]", "cannot be read"),
        ("[add(**{})]", "names no argument"),
        ("[add(1, a=2)]", "or one twice"),
        ("[add(1e999)]", "cannot be read"),
        (r"[add('\ud83d')]", "half of a character"),
        ("[add({1, 2})]", "cannot be read"),
        ("[(1, 2)]", "is no name"),
        ("[" + "(" * 5000 + "]", "cannot be read"),
    ],
)
def test_what_is_no_call_is_text_and_says_why(text: str, why: str) -> None:
    read = CALLS.format().read(text, TOOLS)
    assert "tool_calls" not in read.message and read.message["content"] == text
    assert len(read.broken) == 1 and why in read.broken[0]


def test_several_calls_stand_in_a_turn_and_the_last_need_not_be_closed() -> None:
    read = CALLS.format().read("[add(1, 2)] and [add(3, 4)", TOOLS, first=7)
    assert [call["id"] for call in read.message["tool_calls"]] == ["call00007", "call00008"]
    assert CALLS.laid_out("3") == "<3>"


def test_marks_that_mark_nothing_are_faults() -> None:
    assert not CALLS.faults()
    assert "marks no call" in TextCalls(begin="").faults()[0]
    assert "leaves the result out" in TextCalls(result="x").faults()[0]
