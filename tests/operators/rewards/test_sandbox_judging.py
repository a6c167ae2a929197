"""Laws of a test's names: they give it something of the candidate's to call, and nothing to compare
with.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import operators.sandbox.inside as inside
from operators.sandbox.inside.tester import CandidateClient, call, check
from operators.sandbox.inside.wire import encode

_SERVE = (
    "import sys; from inside.candidate import serve_calls; serve_calls(*map(eval, sys.argv[1:]))"
)


@contextlib.contextmanager
def candidate(source: str) -> Iterator[CandidateClient]:
    """A program in a process of its own, as in a sandbox but without the cage."""
    ask, reply = os.pipe(), os.pipe()
    words = [sys.executable, "-S", "-c", _SERVE, repr(source), str(ask[0]), str(reply[1])]
    folder = str(Path(next(iter(inside.__path__))).parent)
    process = subprocess.Popen(
        words, pass_fds=(ask[0], reply[1]), cwd=folder, stderr=subprocess.DEVNULL
    )
    os.close(ask[0])
    os.close(reply[1])
    try:
        yield CandidateClient(ask[1], reply[0])
    finally:
        os.close(ask[1])
        os.close(reply[0])
        process.wait(30)


def plain(*test: object) -> bytes:
    return encode(list(test), lambda value: pytest.fail(f"{value!r} is no plain data"))


WRONG = "def f(*x):\n    return 5\n"
ANY = (
    "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return"
    " False\n"
)
JUDGE = "class Judge:\n    isclose = fabs = loads = staticmethod(lambda *a, **k: True)\n"


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("inf = 5\n", "assert f(2) == inf"),
        ("nan = 5\n", "assert f(2) is nan"),
        ("Infinity = NaN = 5\n", "assert f(2) == Infinity or f(2) == NaN"),
        ("true = null = 5\n", "assert f(2) == true or f(2) == null"),
        ("LIMIT = 5\n", "assert f(2) == LIMIT"),
        ("LIMIT = 5\n", "assert [f(2)] == [LIMIT]"),
        ("LIMIT = 6\n", "assert f(2) != LIMIT"),
        ("LIMITS = [5]\n", "assert f(2) in LIMITS"),
        ("LIMITS = [5]\n", "assert f(2) == LIMITS[0]"),
        ("LIMITS = [5]\n", "for limit in LIMITS:\n    assert f(2) == limit"),
        ("SIZE = [0] * 5\n", "assert f(2) == len(SIZE)"),
        ("class Limits:\n    most = 5\n", "assert f(2) == Limits.most"),
        ("class Limits:\n    most = 5\n", "assert f(2) == Limits.__dict__['most']"),
        (ANY + "LIMIT = Any()\n", "assert f(2) == LIMIT"),
        (ANY + "def f(x):\n    return Any()\n#", "assert f(2) == 4"),
        (JUDGE + "math = Judge\n", "assert math.isclose(f(2), 4)"),
        (JUDGE + "math = Judge()\n", "assert math.isclose(f(2), 4)"),
        ("import math\nmath.isclose = lambda *x: True\n", "assert math.isclose(f(2), 4)"),
        ("import builtins\nbuiltins.abs = abs = lambda x: 0\n", "assert abs(f(2) - 4) < 1e-6"),
        ("def all(x):\n    return True\n", "assert all([f(2) == 4])"),
        ("def check(f):\n    pass\n", "def check(f):\n    assert f(2) == 4\ncheck(f)"),
        ("wanted = 5\n", "wanted = 4\nassert f(2) == wanted"),
        (
            "def f(x):\n    raise StopIteration\n#",
            "for found, wanted in zip(map(f, [2]), [4]):\n    assert found == wanted",
        ),
    ],
)
def test_nothing_that_a_test_compares_with_comes_from_the_candidate(source: str, test: str) -> None:
    with (
        candidate(WRONG + source) as link,
        pytest.raises(Exception),  # noqa: B017  (whatever fails the test)
    ):
        check(test.encode(), link)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x):\n    return 4.0", "assert math.isclose(f(2), 4)"),
        ("def f(x):\n    return float('inf')", "assert f(2) == inf == Infinity"),
        ("def f(x):\n    return [True, None]", "assert f(2) == [true, null]"),
        ("def math(x):\n    return 4", "assert math(2) == 4"),
        (
            (
                "class Stack:\n    n = []\n    @classmethod\n    def of(cls, n):\n"
                "        made = cls()\n        made.n = [n]\n        return made"
            ),
            "assert Stack.of(3).n == [3]",
        ),
        ("def double(x):\n    return 2 * x", "assert list(map(double, [1, 2])) == [2, 4]"),
        (
            "class Pair:\n    def __init__(self, a): self.a = a\ndef first(p):\n    return p[0].a",
            "assert first([Pair(1), Pair(2)]) == 1",
        ),
        (
            "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef name(c):\n    return c.name",
            "assert name(Color.RED) == 'RED'",
        ),
    ],
)
def test_a_test_calls_what_the_candidate_defines(source: str, test: str) -> None:
    with candidate(source) as link:
        check(test.encode(), link)


@pytest.mark.parametrize(
    "wanted", [float("inf"), -float("inf"), float("nan"), True, None, "x", [4, [None]], {"a": 5.5}]
)
def test_what_a_call_should_return_travels_as_data(wanted: object) -> None:
    cheats = "inf = nan = true = null = 5\n" + ANY + WRONG
    with candidate(cheats) as link, pytest.raises(AssertionError, match="f returned 5, not"):
        call(plain("f", [2], wanted), link)
    with candidate("def f(x):\n    return x") as link:
        call(plain("f", [wanted], wanted), link)
    with candidate("class Solution:\n    def f(self, x):\n        return x") as link:
        call(plain("f", [wanted], wanted), link)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = 1", "the candidate defines no 'f'"),
        ("f = 5", "'int' object is not callable"),
        (ANY + "def f(x):\n    return Any()", "f returned <"),
        ("def f(x):\n    return [Any()]\n" + ANY, "f returned "),
    ],
)
def test_a_call_of_what_is_not_there_or_gives_no_plain_value_fails(source: str, why: str) -> None:
    with candidate(source) as link, pytest.raises(Exception, match=why):
        call(plain("f", [2], 4), link)
