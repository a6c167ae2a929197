"""Asks a model about the rollouts' own tokens: log-probabilities and values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import OperatorError
from dataflow.records import COMPLETION, LOGPROBS, MASK, TOKENS, TURN, AnyArray
from dataflow.tokens.training_rows import unfolded
from operators.forward_pass.query import ModelQuery, lists
from operators.training.learner.learner import Forward
from operators.training.learner.rows import StepRows, step_rows


class OwnTokens:
    """Reads a number for every token that the policy chose, but a first one: what a trainer would
    compute."""

    def __init__(
        self,
        forward: Forward,
        *,
        node: str,
        model: str,
        tokenizer: Any | None,
        context_tokens: int | None,
    ) -> None:
        """node, model: their names, for errors. tokenizer: the model's, to see whether it is the
        policy's too; None where it has none. context_tokens: most that the model takes."""
        self.forward = forward
        self._node, self._model, self._tokenizer = node, model, tokenizer
        self._most = context_tokens
        embedding = forward.module.get_input_embeddings()
        self._vocabulary = int(getattr(embedding, "num_embeddings", len(embedding.weight)))

    def ask(self, rows: pa.RecordBatch) -> ModelQuery:
        """Those rows that are short enough. Raises OperatorError when the tokens are not this
        model's."""
        found = step_rows([rows], (LOGPROBS,))
        lengths = found.longest_R
        fits = np.ones(len(lengths), bool) if self._most is None else lengths <= self._most
        strange = {row: text for row, text in enumerate(self._unknown(found)) if text is not None}
        fits[list(strange)] = False
        if not fits.all():
            found = step_rows([rows.filter(pa.array(fits))], (LOGPROBS,))
        begins, rollouts = unfolded(found.offsets, found.cuts_S)
        self._check(rows)
        return ModelQuery(
            tokens_S=found.tokens.ids,
            read_S=found.chosen_S,
            offsets=begins,
            groups_R=found.groups_R[rollouts],
            row_R=np.flatnonzero(fits)[rollouts],
            left_S=found.tokens.sampling_mask,
            failures={
                row: (
                    f"the rollout has {lengths[row]} tokens, but '{self._model}' takes"
                    f" {self._most}; lower max_tokens"
                )
                for row in np.flatnonzero(~fits).tolist()
            }
            | strange,
        )

    def column(self, rows: pa.RecordBatch, asked: ModelQuery, numbers_S: AnyArray) -> pa.Array:
        """A number per token, 0 where the policy chose none."""
        return lists(numbers_S, np.r_[asked.offsets[:-1][asked.firsts], asked.offsets[-1]])

    def _unknown(self, rows: StepRows) -> Iterator[str | None]:
        """Of each rollout what is wrong with its tokens, and with those that truncation left."""
        left = rows.tokens.sampling_mask
        for first, last in pairwise(rows.offsets.tolist()):
            ids = rows.tokens.ids[first:last]
            largest = int(
                (ids if left is None else np.r_[ids, left[first:last].ids]).max(initial=0)
            )
            if largest < self._vocabulary:
                yield None
            else:
                yield (
                    f"the rollout has token {largest}, but '{self._model}' knows"
                    f" {self._vocabulary}; give a model with the policy's tokenizer"
                )

    def _check(self, rows: pa.RecordBatch) -> None:
        if self._tokenizer is not None and (told := disagreement(self._tokenizer, rows)):
            raise OperatorError(
                f"'{self._node}' reads the policy's tokens with '{self._model}', whose tokenizer is"
                f" another: {told}; give a model with the policy's tokenizer"
            )
        if any(rows.column(COMPLETION).to_pylist()):
            self._tokenizer = None


def disagreement(tokenizer: Any, rows: pa.RecordBatch) -> str | None:
    """How a tokenizer reads the chosen tokens, where in no row it reads what the policy wrote. In
    an episode that is what it said first: what the world said stands in the text, too."""
    told = None
    in_turns = TURN in rows.schema.names
    for tokens, mask, completion in zip(
        *(rows.column(n).to_pylist() for n in (TOKENS, MASK, COMPLETION)), strict=True
    ):
        chosen = np.flatnonzero(mask)
        if completion and len(chosen):
            first = (
                chosen[: 1 + np.flatnonzero(np.diff(chosen, append=-1) != 1)[0]]
                if in_turns
                else chosen
            )
            read = tokenizer.decode(np.asarray(tokens)[first].tolist(), skip_special_tokens=True)
            begin = _bare(read)[: max(1, len(_bare(read)) // 2)]
            if _bare(completion) in _bare(read) or (
                in_turns and begin and begin in _bare(completion)
            ):
                return None
            told = f"the policy wrote {completion[:40]!r}, which it reads as {read[:40]!r}"
    return told


def _bare(text: str) -> str:
    """Without white space, which tokenizers tidy in their own ways, and without cut-off letters."""
    return "".join(text.split()).strip("\N{REPLACEMENT CHARACTER}")
