"""The process that runs one test: its names stand for what the candidate defines, in another process.

The test and the answers it expects are in this process alone. What comes back from the candidate is plain data (an
object that calls itself equal to everything arrives as one that is equal to nothing but itself), so a test that passes
has compared the values that the candidate really returned.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import CodeType

from .wire import decode, encode, read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OF_MORE_THAN_A_TEXT = (UnicodeError, ExceptionGroup)
_RAISED_AGAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _OF_MORE_THAN_A_TEXT)
}


FIND, SAME = "__candidate__", "__same__"
"""Names that a test may use besides its own and the candidate's: `_Finder` and `is_same`."""

PROGRAM_ENDED = "the program ended"
"""The note of a test whose candidate is gone."""


class Remote:
    """Something in the candidate's process: calls, attributes and items are asked for there."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        """What the candidate returned; lists, dicts and sets among the arguments are as it left them."""
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


class Link:
    """Requests to the candidate's process, one at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies

    def ask(self, what: str, target: Remote, *rest: Any) -> Any:
        """The candidate's answer; raises what it raised where that is a common exception, else RuntimeError."""
        write_frame(self._requests, encode([what, target, *rest], _number))
        state, *answer = decode(read_frame(self._replies), lambda number: Remote(self, number))
        if state == "ok":
            return answer[0]
        kind, text = map(str, answer)
        raise _RAISED_AGAIN[kind](text) if kind in _RAISED_AGAIN else RuntimeError(f"{kind}: {text}")


def run_test(source: str, requests: int, replies: int, note: int) -> None:
    """Run a test and end this process with status 0 if it passed; why it did not is written to `note`."""
    try:
        code = compile(source, "test.py", "exec", dont_inherit=True)
        link = Link(requests, replies)
        names = {**_borrowed(link, names_in(code)), "__name__": "test", FIND: _Finder(link), SAME: is_same}
        exec(code, names)
    except BaseException as error:
        os.write(note, _told(error, source).encode("utf-8", "replace")[:500])
        os._exit(1)
    os._exit(0)


def names_in(code: CodeType) -> set[str]:
    """Every name that some code looks up, and that is no built-in of Python's: those mean what they always mean."""
    found = {name for name in code.co_names if not hasattr(builtins, name)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


class _Finder:
    """From a name to the candidate's function, or to the method of its class Solution."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __call__(self, name: str) -> Any:
        found = _borrowed(self._link, {name, "Solution"})
        if name in found:
            return found[name]
        if "Solution" not in found:
            raise NameError(f"the candidate defines no {name!r}")
        return getattr(found["Solution"](), name)


def is_same(found: Any, wanted: Any) -> bool:
    """Whether a value is the one wanted, which comes from JSON: a tuple is a list there, and one may stand in a list.

    The single answer of a case stands in a list of its own in APPS, whose own tests take both.
    """
    plain = _listed(found)
    return bool(plain == wanted or (isinstance(wanted, list) and len(wanted) > 0 and plain == wanted[0]))


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value


def _borrowed(link: Link, names: set[str]) -> dict[str, Any]:
    """What the candidate has under these names; its modules are imported here instead, if they are Python's own."""
    modules, found = link.ask("globals", Remote(link, 0), sorted(names))
    for name, module in modules.items():
        if str(module).partition(".")[0] in sys.stdlib_module_names:
            found[name] = __import__(module, fromlist=["_"])
    return {name: value for name, value in found.items() if name in names}


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
    if type(value) is not Remote:
        raise TypeError(f"a test gave the candidate a {type(value).__name__}, which cannot go to another process")
    return value._number


def _told(error: BaseException, source: str) -> str:
    if isinstance(error, EOFError | BrokenPipeError):
        return PROGRAM_ENDED
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "test.py" else line
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} in `{source.splitlines()[line - 1].strip()}`" if line else text
