"""The generator of bench.chaos.run at work: as any other, with a book of what it drew."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from bench.chaos.figures import DRAWN
from dataflow.folder.ledger import BaseLedger
from dataflow.folder.run_folder import RunFolder
from dataflow.records import GROUP_ID
from dataflow.runtime import Batch, Context
from operators.generation.runtime import GeneratorRuntime

if TYPE_CHECKING:
    from operators import Generator


class _Book:
    """Appends lines to drawn.jsonl, each in one write, so that processes may share it and a kill
    loses none.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._file = os.open(folder.path / DRAWN, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, source: str, groups: Iterable[int]) -> None:
        line = {"at": time.time(), "what": kind, "source": source, "groups": list(groups)}
        os.write(self._file, f"{json.dumps(line)}\n".encode())


class _Told:
    """A ledger that tells the book of the groups that the generator says it has begun."""

    def __init__(self, inner: BaseLedger, book: _Book) -> None:
        self._inner, self._book = inner, book

    def advance(self, source: str, group_ids: Iterable[int], state: str) -> None:
        groups = list(group_ids)
        self._book.write("begun", source, groups)
        self._inner.advance(source, groups, state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Counting(GeneratorRuntime):
    """Writes down which groups it began, when it says so in the ledger, and which it finished."""

    def __init__(self, declaration: Generator, context: Context) -> None:
        assert context.folder is not None and context.ledger is not None, "a run has both"
        self._book = _Book(context.folder)
        ledger = cast(BaseLedger, _Told(context.ledger, self._book))
        super().__init__(declaration, dataclasses.replace(context, ledger=ledger))

    def work(self) -> list[Batch] | None:
        """As the engine does."""
        batches = super().work()
        for batch in batches or ():
            self._book.write(
                "finished", batch.source, dict.fromkeys(batch.records.column(GROUP_ID).to_pylist())
            )
        return batches
