"""The process that runs one test: asks the candidate, in another process, and judges what comes
back.

The test and the answers it expects are in this process alone. What comes back from the candidate is
plain data (an object that calls itself equal to everything arrives as one that is equal to nothing
but itself), and nothing that it is compared with comes from the candidate: a name gives a test
something to call, and never a value.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import CodeType

from .wire import decode, encode, read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

_ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
_OF_MORE_THAN_A_TEXT = (UnicodeError, ExceptionGroup)
_RAISED_AGAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (*_OF_MORE_THAN_A_TEXT, *_ENDS_A_LOOP))
}
_TREE_ONLY = 0x400
"""For `compile`: the syntax tree alone (ast.PyCF_ONLY_AST; importing `ast` costs more than all else
here)."""

LITERALS: dict[str, Any] = {
    "inf": float("inf"),
    "nan": float("nan"),
    "Infinity": float("inf"),
    "NaN": float("nan"),
    "true": True,
    "false": False,
    "null": None,
}
"""What `repr` and JSON write for values that Python has no literal of: a test may use these
names."""

PROGRAM_ENDED = "the program ended"
"""The note of a test whose candidate is gone."""

_SHOWN = 80


class Remote:
    """What a call of the candidate returned that is no plain value: calls, attributes and items are
    asked for there.
    """

    def __init__(self, link: CandidateClient, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        """What the candidate returned; lists, dicts and sets among the arguments are as it left
        them.
        """
        result, after = self._link.ask("call", self, list(arguments), names)
        for ours, theirs in zip(arguments, after, strict=True):
            _follow(ours, theirs)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __iter__(self) -> Any:
        return iter(self._link.ask("list", self))

    def __len__(self) -> int:
        length: int = self._link.ask("length", self)
        return length

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __bool__(self) -> bool:
        raise TypeError("the candidate gave an object where a test wants a plain value")


class Named(Remote):
    """What the candidate has under a name, whatever that is: to be called, handed on, or asked for
    what it has itself.

    Its value would be the candidate's own word, so a test that compares with it fails.
    """

    def __getattr__(self, name: str) -> Named:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(self._link, self._link.ask("part", self, name))

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("a test may call what the candidate defines, but not compare with it")

    __eq__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse
    __hash__ = object.__hash__


class CandidateClient:
    """Requests to the candidate's process, one at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies

    def ask(self, command: str, target: Remote, *operands: Any) -> Any:
        """The candidate's answer; raises what it raised where that is a common exception, else
        RuntimeError.
        """
        write_frame(self._requests, encode([command, target, *operands], _number))
        state, *answer = decode(read_frame(self._replies), lambda number: Remote(self, number))
        if state == "ok":
            return answer[0]
        kind, text = map(str, answer)
        raise (
            _RAISED_AGAIN[kind](text) if kind in _RAISED_AGAIN else RuntimeError(f"{kind}: {text}")
        )

    def named(self, names: set[str]) -> dict[str, Named]:
        """What the candidate has under these names."""
        numbers = self.ask("globals", Remote(self, 0), sorted(names))
        return {name: Named(self, number) for name, number in numbers.items() if name in names}


def run_test(
    judge: Callable[[bytes, CandidateClient], None],
    test: bytes,
    requests: int,
    replies: int,
    note: int,
) -> None:
    """Judge by a test and end this process with status 0 if it passed; why it did not is written to
    `note`.
    """
    sys.set_int_max_str_digits(0)
    try:
        judge(test, CandidateClient(requests, replies))
    except BaseException as error:
        os.write(note, _told(error, test).encode("utf-8", "replace")[:500])
        os._exit(1)
    os._exit(0)


def check(test: bytes, link: CandidateClient) -> None:
    """Run Python text, whose names are its own, the standard library's, or the candidate's; raises
    where it fails.
    """
    text = test.decode()
    code = compile(text, "test.py", "exec", dont_inherit=True)
    names = names_in(code) - LITERALS.keys()
    modules = names & modules_in(text)
    own = {name: __import__(name) for name in modules}
    exec(code, {**link.named(names - modules), **LITERALS, **own, "__name__": "test"})


def call(test: bytes, link: CandidateClient) -> None:
    """Call a function with arguments and compare what it returns; raises where it is another value.

    test: encoded [name, arguments, wanted], all of it plain data.
    """
    name, arguments, expected = decode(test, lambda number: None)
    result = _function(link, name)(*arguments)
    if not is_same(result, expected):
        raise AssertionError(f"{name} returned {_shown(result)}, not {_shown(expected)}")


def names_in(code: CodeType) -> set[str]:
    """Every name that some code looks up, and that is no built-in of Python's: those mean what they
    always mean.
    """
    names = {name for name in code.co_names if not hasattr(builtins, name)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


def modules_in(test: str) -> set[str]:
    """Names of the standard library's modules that a test takes something from (`math.isclose`)."""
    tree = compile(test, "test.py", "exec", _TREE_ONLY, dont_inherit=True)
    bases = (node.value for node in _nodes(tree) if type(node).__name__ == "Attribute")
    return {base.id for base in bases if type(base).__name__ == "Name"} & sys.stdlib_module_names


def is_same(value: Any, expected: Any) -> bool:
    """Whether a value is the one wanted, which comes from JSON: a tuple is a list there, and one
    may stand in a list.

    The single answer of a case stands in a list of its own in APPS, whose own tests take both.
    """
    return _is_equal(value, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _is_equal(value, expected[0])
    )


def _is_equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(actual, list | tuple)
            and len(actual) == len(expected)
            and all(map(_is_equal, actual, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(_is_equal(actual[key], value) for key, value in expected.items())
        )
    is_nan = (
        isinstance(actual, float)
        and isinstance(expected, float)
        and actual != actual
        and expected != expected
    )
    return is_nan or bool(actual == expected)


def _function(link: CandidateClient, name: str) -> Any:
    """The candidate's function of that name, or the method of its class Solution."""
    targets = link.named({name, "Solution"})
    if name in targets:
        return targets[name]
    if "Solution" not in targets:
        raise NameError(f"the candidate defines no {name!r}")
    return getattr(targets["Solution"](), name)


def _nodes(node: Any) -> Iterator[Any]:
    """A syntax tree's nodes."""
    yield node
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else [value]:
            if hasattr(child, "_fields"):
                yield from _nodes(child)


def _follow(ours: Any, theirs: Any) -> None:
    """An argument as the candidate left it, where it is of a kind that a function may change."""
    if theirs is None or type(ours) is not type(theirs):
        return
    if isinstance(ours, list):
        ours[:] = theirs
    elif isinstance(ours, dict | set) and ours != theirs:
        ours.clear()
        ours.update(theirs)


def _number(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(
            f"a test gave the candidate a {type(value).__name__}, which cannot go to another"
            " process"
        )
    return value._number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _told(error: BaseException, test: bytes) -> str:
    if isinstance(error, EOFError | BrokenPipeError):
        return PROGRAM_ENDED
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "test.py" else line
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} in `{test.decode().splitlines()[line - 1].strip()}`" if line else text
