"""What a process of its own does at an address, as a file system may hang: who asks for it gives it
up then.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import DataflowError
from dataflow.folder.copies.address import Address
from dataflow.folder.copies.finding import find
from dataflow.folder.copies.parts import Copies, claim


def _check(copies: Mapping[str, Any]) -> None:
    known = Copies.from_plain(copies)
    assert known is not None, "it is given"
    known.check(Address.of(known.address))


def _claim(text: str, run: str, trainers: list[str], after: int | None) -> dict[str, Any]:
    return claim(Address.of(text), text, run, trainers, after).to_plain()


TASKS: Mapping[str, Callable[..., Any]] = {
    "check": _check,
    "claim": _claim,
    "find": lambda text: find(text).to_plain(),
    "sleep": lambda seconds: time.sleep(seconds),
}


def answer(do: str, given: Mapping[str, Any], pipe: int) -> int:
    """Do one of the tasks; say that it has begun, and then what came of it, a line each. 0: the
    exit status.
    """
    os.write(pipe, b"begun\n")
    try:
        said = {"value": TASKS[do](**given)}
    except DataflowError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    os.write(pipe, json.dumps(said).encode() + b"\n")
    return 0
