"""The process that runs a model's program: as a script with its input, or as functions that a test
calls from afar.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from .wire import decode, encode, read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def run_script(source: str) -> None:
    """Run a program as `python program.py` would, and end this process as it would end."""
    status = 0
    try:
        exec(_compiled(source), _module("__main__").__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        sys.stdout.flush()
    except BaseException as error:
        status = _status(error)
    os._exit(status)


def serve_calls(source: str, requests: int, replies: int) -> None:
    """Run a program for what it defines, then do what a test asks of that, until the test is over.

    consumes: requests (see `tester`), by frames
    produces: a reply to each: ["ok", value] or ["error", kind, text]
    waits for: the next request
    unblocked by: a request, or the end of the test's process
    """
    try:
        module = _module("solution")
        exec(_compiled(source), module.__dict__)
        objects: list[Any] = [module]
        while True:
            write_frame(replies, _answer(read_frame(requests), objects))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:
        os._exit(_status(error))


def _answer(request: bytes, objects: list[Any]) -> bytes:
    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        command, target, *arguments = decode(request, objects.__getitem__)
        if command == "globals":
            return encode(
                [
                    "ok",
                    {
                        name: keep(vars(target)[name])
                        for name in arguments[0]
                        if name in vars(target)
                    },
                ],
                keep,
            )
        if command == "part":
            return encode(["ok", keep(getattr(target, arguments[0]))], keep)
        return encode(["ok", _do(command, target, *arguments)], keep)
    except BaseException as error:
        return encode(["error", type(error).__name__, str(error)], keep)


def _do(command: str, target: Any, *operands: Any) -> Any:
    if command == "call":
        arguments, names = operands
        result = target(*arguments, **names)
        return [
            result,
            [item if isinstance(item, list | dict | set) else None for item in arguments],
        ]
    if command == "list":
        return list(target)
    if command == "length":
        return len(target)
    if command == "item":
        return target[operands[0]]
    return getattr(target, operands[0])


def _module(name: str) -> ModuleType:
    """An empty module by this name, in which a program's globals will be."""
    sys.set_int_max_str_digits(0)
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def _compiled(source: str) -> Any:
    return compile(source, "program.py", "exec", dont_inherit=True)


def _status(error: BaseException) -> int:
    """The status with which Python would end for this; what it would print is printed."""
    try:
        sys.stdout.flush()
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            sys.stderr.write(f"{error.code}\n")
        else:
            sys.__excepthook__(type(error), error, error.__traceback__)
        sys.stderr.flush()
    except BaseException:
        return 1
    return 1
