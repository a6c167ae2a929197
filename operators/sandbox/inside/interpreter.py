"""The Python that a policy works with over several turns: what one piece of code defines, the next
one finds.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import signal
import sys
import traceback
from types import ModuleType

from .wire import read_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "<code>"
"""What tracebacks call it."""


def serve(feed: int, sign: int) -> None:
    """Run pieces of code until the sender closes the stream.

    consumes: code, in frames
    produces: what it prints, and the value of its last expression, on the standard streams; a byte
        when it is over
    waits for: the next piece
    unblocked by: it, or the end of who sends it
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    sys.set_int_max_str_digits(0)
    sys.argv = [""]
    module, own = ModuleType("__main__"), os.getpid()
    sys.modules["__main__"] = module
    while True:
        try:
            source = read_frame(feed).decode("utf-8", "surrogatepass")
        except EOFError:
            os._exit(0)
        except KeyboardInterrupt:  # it came after the code had ended
            continue
        try:
            run(source, module.__dict__)
        except SystemExit as error:
            if error.code not in (None, 0):
                print(f"SystemExit: {error.code}", file=sys.stderr)
        except BaseException as error:
            _tell(error)
        if os.getpid() != own:  # a fork that the code has let go on
            os._exit(0)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            os._exit(1)
        os.write(sign, b".")


def run(source: str, names: dict[str, Any]) -> None:
    """Execute code; where its last statement is an expression, print its value unless it is
    None.
    """
    linecache.cache[NAME] = len(source), None, source.splitlines(keepends=True), NAME
    tree = ast.parse(source, NAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, NAME, "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), names)
        if value is not None:
            names["_"] = value
            builtins.print(repr(value))


def _tell(error: BaseException) -> None:
    """Print a traceback from where the code begins."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace, limit=-20)
    except BaseException as second:
        os.write(
            2, f"{type(error).__name__} ({type(second).__name__} while it was told)\n".encode()
        )
