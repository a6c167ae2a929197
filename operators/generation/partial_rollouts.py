"""When a generator writes down what unfinished rollouts have drawn, and with which of it a later
process goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dataflow.folder.finished import PartialRolloutFiles
from dataflow.folder.partial_rollouts import PartialRollout, PartialRow
from dataflow.records import ROUND_SIZE
from dataflow.runtime import Context
from dataflow.worker.host import in_flight
from operators.engine.interface import DecodingEngine
from operators.engine.knobs import GeneratorKnobs
from operators.generation.groups import PromptGroup
from operators.generation.sampled_with import SampledWith

NEVER = np.iinfo(np.int64).max // 2
"""Tokens that no rollout comes to."""


class PartialRollouts:
    """Writes a generator's unfinished rollouts down, and finds those of earlier processes.

    consumes: the live rollouts and the ended ones of incomplete groups, by `write`; groups that
        start, by `recall`
    produces: rows on the disk; for a group that starts, what earlier processes drew of it
    waits for: the disk
    unblocked by: -

    Once in `every` decode steps it writes the rollouts that have grown by `every` tokens since they
    were last written, and the ends of those whose siblings go on. A group whose rollouts all are
    shorter costs nothing.
    """

    def __init__(
        self, files: Mapping[str, PartialRolloutFiles], *, seed: int, every: int, masks: bool
    ) -> None:
        """files: by source. every: tokens. masks: rollouts record what truncation left."""
        self.recalled = 0
        """Tokens that were not drawn again."""
        self._files, self._seed, self._every, self._masks = files, seed, every, masks
        self._steps = 0

    def recall(
        self,
        group: PromptGroup,
        sampled: Sequence[SampledWith],
        may_go_on: Callable[[PartialRollout], bool],
    ) -> None:
        """Let a group that is about to start begin with what is on the disk of it, unless it is of
        an evaluation.

        sampled: what groups of the run were sampled with, newest last; it goes on with what it had.
        may_go_on: whether a rollout that has drawn this much, or ended with it, may still be
        trained.
        """
        files = self._files.get(group.source)
        if files is None or group.batch.records.column(ROUND_SIZE)[group.row].as_py():
            return
        rows = files.find(group.group_id)
        partials: dict[int, PartialRollout] = {}
        for group.sampled in dict.fromkeys(reversed(sampled)):
            group.mark = group.mark_of(self._seed)
            for row in rows:
                has_masks = row.rollout.tokens.sampling_mask is not None
                fits = (
                    row.mark == group.mark
                    and row.position < group.size
                    and has_masks == self._masks
                )
                if fits and row.position not in partials and may_go_on(row.rollout):
                    partials[row.position] = row.rollout
            if partials:
                break
        else:
            group.sampled = sampled[-1]
            group.mark = group.mark_of(self._seed)
        group.written = [0] * group.size
        if partials:
            group.go_on(partials)
            self.recalled += sum(len(rollout.tokens) for rollout in partials.values())

    def write(self, engine: DecodingEngine, tickets: Mapping[int, tuple[PromptGroup, int]]) -> None:
        """Write down what has grown, if so many steps have passed. tickets: group and position of
        live rollouts.

        Raises RunFolderError when the disk refuses.
        """
        if engine.steps - self._steps < self._every:
            return
        self._steps = engine.steps
        rows: dict[str, list[PartialRow]] = defaultdict(list)

        def since(ticket: int) -> int:
            group, position = tickets[ticket]
            return NEVER if group.mark is None else group.written[position]

        def add(group: PromptGroup, position: int, rollout: PartialRollout) -> None:
            assert group.mark is not None, "it was asked for"
            group.written[position] = rollout.end
            rows[group.source].append(PartialRow(group.group_id, position, group.mark, rollout))

        for ticket, rollout in engine.new_tokens(since, self._every):
            add(*tickets[ticket], rollout)
        for group in {
            id(group): group for group, _ in tickets.values() if group.mark is not None
        }.values():
            for position, rollout in group.unwritten_ends(self._every):
                add(group, position, rollout)
        for source, of_source in rows.items():
            self._files[source].append(of_source)

    def forget(self, source: str, group: int) -> None:
        """The group has an outcome."""
        if source in self._files:
            self._files[source].forget(group)

    def close(self) -> None:
        """End the files that are being written."""
        for files in self._files.values():
            files.close()


def partial_rollouts_of(declaration: GeneratorKnobs, context: Context) -> PartialRollouts | None:
    """Those of a generator that has a run folder, those of earlier processes looked through; None
    for vLLM, which cannot go on with any.
    """
    folder, ledger = context.folder, context.ledger
    if folder is None or ledger is None or declaration.engine == "vllm":
        return None
    files = {
        source: PartialRolloutFiles(
            folder.finished(context.node),
            source,
            replica=context.rank,
            attempt=context.attempt,
            waited_for=partial(in_flight, ledger, source, folder),
        )
        for source in context.columns
    }
    return PartialRollouts(
        files, seed=context.seed, every=declaration.segment_tokens, masks=declaration.records_mask
    )
