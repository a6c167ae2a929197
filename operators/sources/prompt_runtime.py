"""The runtime of Prompts: issues prompt groups in a seeded order that is a function of the group's
number.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.records import (
    GROUP_ID,
    GROUP_SIZE,
    MIN_VERSION,
    PROMPT,
    PROMPT_ID,
    ROUND_SIZE,
    AnyArray,
)
from dataflow.rules.issue import ROWS_AT_ONCE, issue_until
from dataflow.runtime import Batch, Context, Runtime
from operators.sources.prompt_rows import Report


def permutation(seed: int | None, epoch: int, rows: int) -> AnyArray:
    """Order of the rows in an epoch, int64 [rows]: the same for the same numbers, on every machine.

    The raw bits of PCG64 are sorted, because numpy promises those, but not its own shuffle, for
    ever.
    """
    if seed is None:
        return np.arange(rows)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(rows), kind="stable")


class PromptRuntime(Runtime):
    """Issues prompts.

    consumes: nothing
    produces: up to 32 groups at a time, each written into the ledger before it leaves
    waits for: steps that need more groups (drops are told by the control), or the next evaluation
        round
    unblocked by: {"dropped": n}, {"evaluate": step}

    Where the ledger knows groups without an outcome when it starts, they are issued again, under
    their numbers, before any other: whoever has them still knows them by these.
    """

    def __init__(
        self,
        table: pa.Table,
        report: Report,
        context: Context,
        *,
        name: str,
        shuffle_seed: int | None,
        group_size: int | None,
        epochs: int | None,
        notice: str = "",
    ) -> None:
        """table: the prompts of an epoch. notice: for the user. The rest as `operators.Prompts` has
        it.
        """
        self._notice = notice
        self._source = name
        self._seed = None if shuffle_seed is None else shuffle_seed + context.seed
        self._group_size = group_size or 0
        self._table = table
        self._dropped_rows = report.dropped
        self._ledger = context.ledger
        self._on_demand = context.on_demand
        self._next = 0 if context.ledger is None else context.ledger.next_group_id(self._source)
        self._again: deque[int] | None = None
        """Groups to be issued once more, in order; None: before its first work, when every node is
        ready."""
        self._last = None if epochs is None else epochs * len(table)
        bound = context.bounds.get(self._source)
        steps = None if bound is None else bound.steps if bound.steps is not None else context.steps
        self._needed = None if bound is None or steps is None else steps * bound.prompts_per_step
        self._dropped_groups = 0
        self._is_draining = False
        self._order: tuple[int, AnyArray] = (-1, np.arange(0))
        self._rounds: deque[int] = deque()
        self._asked = -1
        """Step of the last round that was asked for."""
        self._at = 0

    def work(self) -> list[Batch] | None:
        """The next groups, if any are wanted."""
        if self._is_draining:
            return None
        if self._again is None:
            self._again = self._in_flight()
        if self._on_demand:
            return self._round(self._again) if self._rounds else None
        if self._again:
            again = [self._again.popleft() for _ in range(min(len(self._again), ROWS_AT_ONCE))]
            return [self._issue(again, self._rows(again), 0, 0)]
        stop = issue_until(
            self._next, last=self._last, needed=self._needed, dropped=self._dropped_groups
        )
        if stop <= self._next:
            return None
        groups = range(self._next, stop)
        return [self._issue(groups, self._rows(groups), 0, 0)]

    def pending(self) -> int:
        """Prompts that the rounds asked for still lack."""
        if self._is_draining:
            return 0
        return len(self._rounds) * len(self._table) - self._at

    def tell(self, message: Mapping[str, Any]) -> None:
        """{"evaluate": step}: issue a round, once however often it is asked for; with "again", all
        of the open one. Recorded rounds are skipped. {"dropped": n}: n more groups are needed;
        {"drain": True}: no more.
        """
        if "evaluate" in message and self._on_demand:
            step, again = int(message["evaluate"]), bool(message.get("again"))
            if again:
                self._rounds.clear()
                self._at, self._again = 0, self._in_flight()
            # Asked after what is in flight, so that of a round that is recorded in between only its
            # own groups remain.
            if (again or step > self._asked) and not self._is_judged(step):
                self._rounds.append(step)
            self._asked = max(self._asked, step)
        if "dropped" in message:
            self._dropped_groups = max(self._dropped_groups, int(message["dropped"]))
        if message.get("drain"):
            self._is_draining = True

    def status(self) -> dict[str, float | int | str]:
        """Groups issued, prompts of an epoch, rows left out because they are bad, and whether it is
        done.
        """
        is_over = (
            self._last is not None
            and self._next >= self._last
            and not self._on_demand
            and self._again == deque()
        )
        return {
            "issued": self._next,
            "rows": len(self._table),
            "bad_rows": self._dropped_rows,
            "done": int(is_over or self._is_draining),
            **({"notice": self._notice} if self._notice else {}),
        }

    def _is_judged(self, step: int) -> bool:
        """Whether the round of a step is recorded."""
        return self._ledger is not None and self._ledger.is_judged(self._source, step)

    def _in_flight(self) -> deque[int]:
        """Groups without an outcome, in order."""
        waiting = [] if self._ledger is None else self._ledger.in_flight(self._source)
        return deque(group.group_id for group in waiting)

    def _rows(self, groups: Sequence[int]) -> AnyArray:
        """Rows of some groups."""
        rows = np.empty(len(groups), np.int64)
        size = len(self._table)
        for at, group in enumerate(groups):
            epoch, place = divmod(group, size)
            if self._order[0] != epoch:
                self._order = (epoch, permutation(self._seed, epoch, size))
            rows[at] = self._order[1][place]
        return rows

    def _round(self, waiting: deque[int]) -> list[Batch]:
        """The next groups of a round; an interrupted round restarts with its groups' numbers."""
        stop = min(self._at + ROWS_AT_ONCE, len(self._table))
        count = stop - self._at
        again = [waiting.popleft() for _ in range(min(len(waiting), count))]
        groups = [*again, *range(self._next, self._next + count - len(again))]
        batch = self._issue(groups, np.arange(self._at, stop), self._rounds[0], len(self._table))
        self._at = stop
        if stop == len(self._table):
            self._rounds.popleft()
            self._at = 0
        return [batch]

    def _issue(
        self, groups: Sequence[int], rows: AnyArray, min_version: int, round_size: int
    ) -> Batch:
        count = len(rows)
        ids = np.asarray(groups, np.int64)
        table = self._table.take(pa.array(rows)).combine_chunks()
        names = [
            PROMPT_ID,
            PROMPT,
            *(name for name in table.schema.names if name not in (PROMPT_ID, PROMPT)),
        ]
        columns = {name: _flat(table.column(name)) for name in names}
        columns[GROUP_ID] = pa.array(ids)
        for name, value in (
            (GROUP_SIZE, self._group_size),
            (MIN_VERSION, min_version),
            (ROUND_SIZE, round_size),
        ):
            columns[name] = pa.array(np.full(count, value, np.int32))
        order = [GROUP_ID, PROMPT_ID, PROMPT, GROUP_SIZE, MIN_VERSION, ROUND_SIZE, *names[2:]]
        if self._ledger is not None:
            self._ledger.issue(
                self._source, list(zip(ids.tolist(), columns[PROMPT_ID].to_pylist(), strict=True))
            )
        self._next = max(self._next, int(ids[-1]) + 1)
        return Batch(
            self._source, pa.RecordBatch.from_arrays([columns[name] for name in order], names=order)
        )


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
