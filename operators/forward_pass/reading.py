"""How a forward operator asks a module that is loaded already; imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from dataflow.errors import OperatorError
from dataflow.model import Model
from dataflow.records import COMPLETION, GROUP_ID, LOGPROBS, MASK, PROMPT, TOKENS, TURN, AnyArray
from dataflow.tokens.ragged import list_lengths
from dataflow.tokens.rollout_tokens import SamplingMask, unfolded
from operators.chat.chat_template import ChatTemplate, beginning_of
from operators.forward import ForwardOperator, Logprobs, RewardModel
from operators.models.borders import longest
from operators.models.folders import ModelError
from operators.models.loading import load_tokenizer
from operators.training.learner.copies import adds_up_in_float32
from operators.training.learner.cpu import DirectGradients, multiplies_bfloat16
from operators.training.learner.learner import Forward
from operators.training.learner.policy import Critic, Policy
from operators.training.learner.rows import StepRows, step_rows

# What is asked of a model about some rows.


@dataclass(frozen=True, kw_only=True)
class ModelQuery:
    """Sequences and where a number is wanted; axis suffixes as in
    `operators.training.learner.rows`, R sequences.
    """

    tokens_S: AnyArray
    read_S: AnyArray
    """Whether a number is wanted for a token; it is read at the one before it; bool."""
    offsets: AnyArray
    """[R + 1] into S."""
    groups_R: AnyArray
    """group_id of each."""
    row_R: AnyArray
    """Which of the rows it was made of, in their order; several are of one row where it has several
    training rows."""
    left_S: SamplingMask | None = None
    """The ids that truncation left at each token."""
    places_R: tuple[AnyArray, ...] = ()
    """Tokens of the rollout that each sequence's numbers belong to, where those are not the tokens
    that were read."""
    failures: dict[int, str] = field(default_factory=dict)
    """By row, why nothing could be asked about it."""

    @property
    def firsts(self) -> AnyArray:
        """The first sequence of each row that has any."""
        return np.flatnonzero(np.diff(self.row_R, prepend=-1))


def lists(numbers_S: AnyArray, offsets: AnyArray) -> pa.ListArray:
    """A list of float32 for each range of offsets."""
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(numbers_S.astype(np.float32), pa.float32())
    )


# Asks a model about the rollouts' own tokens: log-probabilities and values.


class OwnTokens:
    """Reads a number for every token that the policy chose, but a first one: what a trainer would
    compute.
    """

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
        policy's too; None where it has none. context_tokens: most that the model takes.
        """
        self.forward = forward
        self._node, self._model, self._tokenizer = node, model, tokenizer
        self._most = context_tokens
        self._vocabulary = _vocabulary_of(forward)

    def ask(self, rows: pa.RecordBatch) -> ModelQuery:
        """What to compute for rows that have not failed and are short enough. Raises OperatorError
        when the tokens are not this model's.
        """
        step = step_rows([rows], (LOGPROBS,))
        lengths = step.longest_R
        fits = np.ones(len(lengths), bool) if self._most is None else lengths <= self._most
        strange = {row: text for row, text in enumerate(self._unknown(step)) if text is not None}
        fits[list(strange)] = False
        if not fits.all():
            step = step_rows([rows.filter(pa.array(fits))], (LOGPROBS,))
        begins, rollouts = unfolded(step.offsets, step.cuts_S)
        self._check(rows)
        return ModelQuery(
            tokens_S=step.tokens.ids,
            read_S=step.chosen_S,
            offsets=begins,
            groups_R=step.groups_R[rollouts],
            row_R=np.flatnonzero(fits)[rollouts],
            left_S=step.tokens.sampling_mask,
            failures={
                row: (
                    f"the rollout has {lengths[row]} tokens, but '{self._model}' takes"
                    f" {self._most}; lower max_tokens"
                )
                for row in np.flatnonzero(~fits).tolist()
            }
            | strange,
        )

    def column(self, rows: pa.RecordBatch, query: ModelQuery, numbers_S: AnyArray) -> pa.Array:
        """The answers, one for each row that was asked about: a number per token, 0 where the
        policy chose none. numbers_S: float32, 0 where none was wanted.
        """
        return lists(numbers_S, np.r_[query.offsets[:-1][query.firsts], query.offsets[-1]])

    def _unknown(self, rows: StepRows) -> Iterator[str | None]:
        """For each rollout, what is wrong with its tokens or with the ids that truncation left."""
        masks = rows.tokens.sampling_mask
        for first, last in pairwise(rows.offsets.tolist()):
            ids = rows.tokens.ids[first:last]
            largest = int(
                (ids if masks is None else np.r_[ids, masks[first:last].ids]).max(initial=0)
            )
            if largest < self._vocabulary:
                yield None
            else:
                yield (
                    f"the rollout has token {largest}, but '{self._model}' knows"
                    f" {self._vocabulary}; give a model with the policy's tokenizer"
                )

    def _check(self, rows: pa.RecordBatch) -> None:
        if self._tokenizer is not None and (difference := disagreement(self._tokenizer, rows)):
            raise OperatorError(
                f"'{self._node}' reads the policy's tokens with '{self._model}', whose tokenizer is"
                f" another: {difference}; give a model with the policy's tokenizer"
            )
        if any(rows.column(COMPLETION).to_pylist()):
            self._tokenizer = None


def disagreement(tokenizer: Any, rows: pa.RecordBatch) -> str | None:
    """How a tokenizer reads the chosen tokens, where in no row it reads the policy's text. In an
    episode only the first turn counts: later text is mixed with the world's.
    """
    difference = None
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
            difference = f"the policy wrote {completion[:40]!r}, which it reads as {read[:40]!r}"
    return difference


def _bare(text: str) -> str:
    """Without white space, which tokenizers tidy in their own ways, and without cut-off letters."""
    return "".join(text.split()).strip("\N{REPLACEMENT CHARACTER}")


# Texts as a judge reads them: prompt and completion laid out, cut into steps, found again in
# tokens.


@dataclass(frozen=True)
class Laid:
    """A text and where the completion stands in it."""

    text: str
    begin: int
    """Its first character."""


def lay_out(
    template: ChatTemplate | None, prompt: str | None, completion: str | None, *, suffix: str
) -> Laid:
    """Prompt, completion and suffix; by a chat template, if any.

    Then the prompt is a list of {"role", "content"} as JSON, or the user's words. Raises ValueError
    when there is no text, and when the template does not keep the completion as it is.
    """
    if prompt is None or completion is None:
        raise ValueError(
            f"the {'prompt' if prompt is None else 'completion'} is null; give every row a text"
        )
    if template is None:
        return Laid(prompt + completion + suffix, len(prompt))
    messages = _messages(prompt)
    begun = beginning_of(messages)
    earlier = messages if begun is None else messages[:-1]
    turn = {"role": "assistant", "content": (begun or "") + completion}
    text = template.render([*earlier, turn], opens=False)
    begin = text.rfind(completion)
    if begin < 0:
        raise ValueError(
            f"the judge's chat template changes the completion {completion[:40]!r}, found"
            f" {text[-80:]!r}; use chat=False"
        )
    return Laid(text + suffix, begin)


def step_ends(completion: str, cut: str) -> list[int]:
    """The end of each step, in characters: behind each `cut`, and at the end; a step without a word
    is none.
    """
    ends: list[int] = []
    begin = 0
    while begin < len(completion):
        at = completion.find(cut, begin)
        end = len(completion) if at < 0 else at + len(cut)
        if completion[begin:end].replace(cut, "").strip():
            ends.append(end)
        begin = end
    return ends


def tokens_at(token_ends: AnyArray, characters: AnyArray) -> AnyArray:
    """For each number of characters the first token with which so many are there. token_ends:
    [tokens], characters up to each token's end; 0 for tokens that stand for no text.
    """
    return np.searchsorted(np.maximum.accumulate(token_ends), characters)


def read_ends(tokenizer: Any, tokens: list[int], characters: list[int]) -> list[int]:
    """For each number of characters, ascending, the first of the tokens with which so many are
    there.

    Raises ValueError when all of them together are fewer.
    """
    ends: list[int] = []
    low = 0
    for count in characters:
        high = len(tokens)
        if len(tokenizer.decode(tokens, skip_special_tokens=True)) < count:
            raise ValueError(
                "the tokens hold less text than the completion; give policy=Model(...), whose"
                " tokens they are"
            )
        while low < high:
            middle = (low + high) // 2
            if len(tokenizer.decode(tokens[: middle + 1], skip_special_tokens=True)) < count:
                low = middle + 1
            else:
                high = middle
        ends.append(low)
    return ends


def _messages(prompt: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(prompt)
    except json.JSONDecodeError:
        messages = None
    return messages if isinstance(messages, list) else [{"role": "user", "content": prompt}]


# Asks a judge about rollouts as texts: laid out and tokenized its own way, a number per text or
# per step.


class OwnText:
    """Reads a number at the end of each text, or of each of its steps."""

    def __init__(
        self,
        declaration: RewardModel,
        forward: Forward,
        *,
        node: str,
        tokenizer: Any,
        policy_tokenizer: Any,
        context_tokens: int | None,
    ) -> None:
        """tokenizer: the judge's. policy_tokenizer: of the one that made the tokens.
        context_tokens: most that the judge takes. Raises OperatorError when steps are wanted and
        the tokenizer does not say where tokens stand.
        """
        self.forward = forward
        self._declaration, self._node, self._tokenizer = declaration, node, tokenizer
        self._template = ChatTemplate(tokenizer) if declaration.chat else None
        self._policy_tokenizer, self._most = policy_tokenizer, context_tokens
        self._is_checked = declaration.per != "step"
        self._vocabulary = _vocabulary_of(forward)
        if declaration.per == "step" and not tokenizer.is_fast:
            raise OperatorError(
                f"'{node}' judges steps, but the tokenizer of '{declaration.model.name}'"
                f" ({type(tokenizer).__name__}) does not say where in the text its tokens stand;"
                " give a judge with a fast tokenizer (tokenizer.json), or per='rollout'"
            )

    def ask(self, rows: pa.RecordBatch) -> ModelQuery:
        """The texts that can be laid out and are short enough. Raises OperatorError when the tokens
        are another's.
        """
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

    def column(self, rows: pa.RecordBatch, query: ModelQuery, numbers_S: AnyArray) -> pa.Array:
        """Float64 [R], or lists over the rollout's tokens with each step's number at its last
        token.
        """
        if self._declaration.per == "rollout":
            return pa.array(numbers_S[query.offsets[1:] - 1].astype(np.float64))
        offsets = np.r_[0, np.cumsum(list_lengths(rows.column(TOKENS))[query.row_R])]
        placed = np.zeros(int(offsets[-1]), np.float32)
        for sequence, places in enumerate(query.places_R):
            mine = slice(query.offsets[sequence], query.offsets[sequence + 1])
            np.add.at(placed, offsets[sequence] + places, numbers_S[mine][query.read_S[mine]])
        return lists(placed, offsets)

    def _encoded(self, texts: dict[int, Laid]) -> dict[int, tuple[AnyArray, AnyArray]]:
        """By row its tokens and, where steps are wanted, the end of each in the text."""
        if not texts:
            return {}
        steps = self._declaration.per == "step"
        encoding = self._tokenizer(
            [laid.text for laid in texts.values()],
            add_special_tokens=not self._declaration.chat,
            return_offsets_mapping=steps,
        )
        ends = encoding["offset_mapping"] if steps else [()] * len(texts)
        return {
            row: (np.array(tokens, np.int64), np.array([end for _, end in spans], np.int64))
            for row, tokens, spans in zip(texts, encoding["input_ids"], ends, strict=True)
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
        if difference := disagreement(self._policy_tokenizer, rows):
            raise OperatorError(
                f"'{self._node}' looks for the last token of each step, but the tokens are not"
                f" those of its tokenizer: {difference}; give policy=Model(...), whose tokens they"
                " are"
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
    that asked for.
    """
    row_R = np.array(list(sequences), np.int64)
    tokens, read = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    for sequence in sequences.values():
        tokens.append(np.r_[sequence.tokens, 0])
        read.append(np.isin(np.arange(len(sequence.tokens) + 1), sequence.read + 1))
    return ModelQuery(
        tokens_S=np.concatenate(tokens),
        read_S=np.concatenate(read),
        offsets=np.r_[0, np.cumsum([len(ids) for ids in tokens[1:]])].astype(np.int64),
        groups_R=rows.column(GROUP_ID).to_numpy()[row_R],
        row_R=row_R,
        places_R=tuple(sequence.places for sequence in sequences.values()),
        failures=failures,
    )


Reading: TypeAlias = OwnTokens | OwnText
"""How an operator asks its model about rows, and what it makes of the answers."""


def reading_of(
    declaration: ForwardOperator, node: str, module: Any, *, is_alone: bool = False
) -> Reading:
    """How a declared operator asks a module that is loaded already; is_alone: and is not shared
    out.
    """
    config = module.config.get_text_config()
    most = longest(declaration.model, config)
    if isinstance(declaration, RewardModel):
        if config.pad_token_id is None:
            # classifiers of sequences refuse several rows without one; nothing is padded here
            config.pad_token_id = 0
        judge, policy = declaration.model, declaration.policy or declaration.model
        tokenizer = load_tokenizer(judge)
        return OwnText(
            declaration,
            forward_of(declaration, module, is_alone),
            node=node,
            tokenizer=tokenizer,
            policy_tokenizer=tokenizer if policy == judge else load_tokenizer(policy),
            context_tokens=most,
        )
    return OwnTokens(
        forward_of(declaration, module, is_alone),
        node=node,
        model=declaration.model.name,
        tokenizer=_tokenizer(declaration.model),
        context_tokens=most,
    )


def forward_of(declaration: ForwardOperator, module: Any, is_alone: bool) -> Forward:
    """The module as a trainer of the same model would see it: where weights agree, so do the
    numbers.

    A trainer computes with copies of its float32 weights in the model's type; here the weights
    themselves are in it.
    """
    dtype, on_cpu = declaration.model.dtype, next(module.parameters()).device.type == "cpu"
    compute = None if dtype == "float32" else getattr(torch, dtype)
    if compute is not None and on_cpu:
        adds_up_in_float32(module)
    if isinstance(declaration, Logprobs):
        forward: Policy | Critic = Policy(
            module, temperature=declaration.temperature, compute=compute
        )
    else:
        forward = Critic(module, compute=compute)
    if is_alone and on_cpu and compute == torch.bfloat16 and multiplies_bfloat16():
        forward.direct = DirectGradients(module, is_rounded=True)
    return forward


def _tokenizer(model: Model) -> Any | None:
    """Only to see whether it is the policy's: a folder without one is taken at its word."""
    try:
        return load_tokenizer(model)
    except ModelError:
        return None


def _vocabulary_of(forward: Forward) -> int:
    """How many tokens its model knows."""
    embedding = forward.module.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", len(embedding.weight)))
