"""Asks a judge about rollouts as texts: laid out and tokenized its own way, a number per text or
per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import OperatorError
from dataflow.records import COMPLETION, GROUP_ID, MASK, PROMPT, TOKENS, AnyArray
from dataflow.tokens.ragged import list_lengths
from operators.chat.chat_template import ChatTemplate
from operators.forward_pass.knobs import RewardKnobs
from operators.forward_pass.own_tokens import disagreement
from operators.forward_pass.query import ModelQuery, lists
from operators.forward_pass.texts import Laid, lay_out, read_ends, step_ends, tokens_at
from operators.training.learner.learner import Forward


class OwnText:
    """Reads a number at the end of each text, or of each of its steps."""

    def __init__(
        self,
        declaration: RewardKnobs,
        forward: Forward,
        *,
        node: str,
        tokenizer: Any,
        policy_tokenizer: Any,
        context_tokens: int | None,
    ) -> None:
        """tokenizer: the judge's. policy_tokenizer: of the one that made the tokens.
        context_tokens: most that the judge takes. Raises OperatorError when steps are wanted and
        the tokenizer does not say where tokens stand."""
        self.forward = forward
        self._declaration, self._node, self._tokenizer = declaration, node, tokenizer
        self._template = ChatTemplate(tokenizer) if declaration.chat else None
        self._policy_tokenizer, self._most = policy_tokenizer, context_tokens
        self._is_checked = declaration.per != "step"
        embedding = forward.module.get_input_embeddings()
        self._vocabulary = int(getattr(embedding, "num_embeddings", len(embedding.weight)))
        if declaration.per == "step" and not tokenizer.is_fast:
            raise OperatorError(
                f"'{node}' judges steps, but the tokenizer of '{declaration.model.name}'"
                f" ({type(tokenizer).__name__}) does not say where in the text its tokens stand;"
                " give a judge with a fast tokenizer (tokenizer.json), or per='rollout'"
            )

    def ask(self, rows: pa.RecordBatch) -> ModelQuery:
        """The texts that can be laid out and are short enough. Raises OperatorError when the tokens
        are another's."""
        self._check(rows)
        failures: dict[int, str] = {}
        texts: dict[int, Laid] = {}
        columns = (rows.column(name).to_pylist() for name in (PROMPT, COMPLETION))
        for row, (prompt, completion) in enumerate(zip(*columns, strict=True)):
            try:
                texts[row] = lay_out(
                    self._template, prompt, completion, suffix=self._declaration.suffix
                )
            except Exception as error:  # a template may raise what it likes
                failures[row] = str(error)
        sequences: dict[int, _Sequence] = {}
        for row, (tokens, token_ends) in self._encoded(texts).items():
            try:
                sequences[row] = self._sequence(rows, row, texts[row], tokens, token_ends)
            except ValueError as error:
                failures[row] = str(error)
        return _asked(rows, sequences, failures)

    def column(self, rows: pa.RecordBatch, asked: ModelQuery, numbers_S: AnyArray) -> pa.Array:
        """Float64 [R], or lists over the rollout's tokens with each step's number at its last
        token."""
        if self._declaration.per == "rollout":
            return pa.array(numbers_S[asked.offsets[1:] - 1].astype(np.float64))
        offsets = np.r_[0, np.cumsum(list_lengths(rows.column(TOKENS))[asked.row_R])]
        placed = np.zeros(int(offsets[-1]), np.float32)
        for sequence, places in enumerate(asked.places_R):
            mine = slice(asked.offsets[sequence], asked.offsets[sequence + 1])
            np.add.at(placed, offsets[sequence] + places, numbers_S[mine][asked.read_S[mine]])
        return lists(placed, offsets)

    def _encoded(self, texts: dict[int, Laid]) -> dict[int, tuple[AnyArray, AnyArray]]:
        """By row its tokens and, where steps are wanted, the end of each in the text."""
        if not texts:
            return {}
        steps = self._declaration.per == "step"
        made = self._tokenizer(
            [laid.text for laid in texts.values()],
            add_special_tokens=not self._declaration.chat,
            return_offsets_mapping=steps,
        )
        ends = made["offset_mapping"] if steps else [()] * len(texts)
        return {
            row: (np.array(tokens, np.int64), np.array([end for _, end in spans], np.int64))
            for row, tokens, spans in zip(texts, made["input_ids"], ends, strict=True)
        }

    def _sequence(
        self, rows: pa.RecordBatch, row: int, laid: Laid, tokens: AnyArray, token_ends: AnyArray
    ) -> _Sequence:
        """Where numbers are read, and whose they are. Raises ValueError."""
        if not len(tokens):
            raise ValueError(
                "the text is empty; give a judge that begins texts with a token, or drop empty"
                " rollouts"
            )
        if self._most is not None and len(tokens) > self._most:
            raise ValueError(
                f"the text has {len(tokens)} tokens, but '{self._declaration.model.name}' takes"
                f" {self._most}; lower max_tokens"
            )
        if int(tokens.max()) >= self._vocabulary:
            raise ValueError(
                f"the text has token {tokens.max()}, but '{self._declaration.model.name}' knows"
                f" {self._vocabulary}; give a judge whose tokenizer is its own"
            )
        none = np.zeros(0, np.int64)
        if self._declaration.per == "rollout":
            return _Sequence(tokens, np.array([len(tokens) - 1]), none)
        ends = step_ends(rows.column(COMPLETION)[row].as_py(), self._declaration.cut)
        chosen = np.flatnonzero(rows.column(MASK)[row].as_py())
        if not ends or not len(chosen):
            return _Sequence(tokens, none, none)
        ids = np.asarray(rows.column(TOKENS)[row].as_py())[chosen].tolist()
        places = chosen[[*read_ends(self._policy_tokenizer, ids, ends)[:-1], len(chosen) - 1]]
        read = np.minimum(tokens_at(token_ends, laid.begin + np.array(ends)), len(tokens) - 1)
        alone = np.r_[read[1:] != read[:-1], True]  # of steps that end within one token the last
        return _Sequence(tokens, read[alone], places[alone])

    def _check(self, rows: pa.RecordBatch) -> None:
        """Once, on the first rows with a text."""
        if self._is_checked:
            return
        if told := disagreement(self._policy_tokenizer, rows):
            raise OperatorError(
                f"'{self._node}' looks for the last token of each step, but the tokens are not"
                f" those of its tokenizer: {told}; give policy=Model(...), whose tokens they are"
            )
        self._is_checked = any(rows.column(COMPLETION).to_pylist())


@dataclass(frozen=True)
class _Sequence:
    """A text as the judge reads it."""

    tokens: AnyArray
    read: AnyArray
    """Tokens at which a number is read."""
    places: AnyArray
    """Tokens of the rollout that they belong to."""


def _asked(
    rows: pa.RecordBatch, sequences: dict[int, _Sequence], failures: dict[int, str]
) -> ModelQuery:
    """A token more at the end of each, which is not computed: a number is read at the one before
    that asked for."""
    row_R = np.array(list(sequences), np.int64)
    tokens, read = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    for sequence in sequences.values():
        tokens.append(np.r_[sequence.tokens, 0])
        read.append(np.isin(np.arange(len(sequence.tokens) + 1), sequence.read + 1))
    return ModelQuery(
        tokens_S=np.concatenate(tokens),
        read_S=np.concatenate(read),
        offsets=np.r_[0, np.cumsum([len(each) for each in tokens[1:]])].astype(np.int64),
        groups_R=rows.column(GROUP_ID).to_numpy()[row_R],
        row_R=row_R,
        places_R=tuple(sequence.places for sequence in sequences.values()),
        failures=failures,
    )
