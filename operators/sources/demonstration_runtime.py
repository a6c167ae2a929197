"""The runtime of Demonstrations: tokenizes prompts and reference answers into rollouts; imports
torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from dataflow.model import Model
from dataflow.records import GROUP_ID, MIN_VERSION, PROMPT, TEMPERATURE
from dataflow.runtime import Batch, Runtime
from dataflow.scoring.failure import TOO_LONG, UNUSABLE, RolloutFailure
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.chat_template import ChatTemplate, text_ids
from operators.engine.interface import STOPPED, EndedRollout
from operators.engine.stop_strings import end_tokens
from operators.generation.groups import PromptGroup, rollouts
from operators.generation.tokenize import RowLayout, encode, unknown_token
from operators.models.borders import longest
from operators.models.folders import ModelError
from operators.models.loading import load_configs, load_tokenizer

_ROOM = 512
_CONTEXT_TOKENS = 4096


class DemonstrationRuntime(Runtime):
    """Tokenizes.

    consumes: prompts with answers
    produces: their rollouts, batch by batch
    waits for: nothing
    unblocked by: -
    """

    def __init__(
        self,
        model: Model,
        *,
        node: str,
        answer: str,
        chat: bool,
        options: Mapping[str, Any],
        context_tokens: int | None,
    ) -> None:
        """As `operators.Demonstrations` has them, in its node."""
        self._node, self._answer = node, answer
        config, generation = load_configs(model)
        self._tokenizer = load_tokenizer(model)
        self._template = ChatTemplate(self._tokenizer, **options) if chat else None
        ends = end_tokens(
            SimpleNamespace(config=config, generation_config=generation), self._tokenizer
        )
        if not ends:
            raise ModelError(
                f"model '{model.name}' has no end token, so nobody could learn when to stop:"
                f" neither {model.source}'s tokenizer nor its configs name an eos_token; name one"
                " there"
            )
        own = self._tokenizer.eos_token_id
        self._end = self._end_of_turn() or [ends[0] if own is None else own]
        self._context_tokens = longest(model, config, context_tokens) or _CONTEXT_TOKENS
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._queue: deque[Batch] = deque()

    def room(self) -> int:
        """Rows it would take now."""
        return max(0, _ROOM - self.pending())

    def push(self, batch: Batch) -> None:
        """Queue a batch."""
        self._queue.append(batch)

    def pending(self) -> int:
        """Rows queued."""
        return sum(batch.records.num_rows for batch in self._queue)

    def status(self) -> dict[str, float | int | str]:
        """Rows queued."""
        return {"queue": self.pending()}

    def work(self) -> list[Batch] | None:
        """The rollouts of one batch."""
        if not self._queue:
            return None
        batch = self._queue.popleft()
        if not batch.records.num_rows:
            return []
        ids, versions = (batch.records.column(name).to_pylist() for name in (GROUP_ID, MIN_VERSION))
        groups = [
            PromptGroup(
                source=batch.source,
                group_id=group_id,
                size=1,
                min_version=min_version,
                batch=batch,
                row=row,
                prompt=np.zeros(0, np.int64),
                unstarted=0,
                left=0,
            )
            for row, (group_id, min_version) in enumerate(zip(ids, versions, strict=True))
        ]
        for group, demonstration in zip(groups, self._demonstrated(batch), strict=True):
            if isinstance(demonstration, str):
                group.fail(demonstration)
            else:
                group.rows = [demonstration]
        records = rollouts(groups, self._tokenizer, frozenset(self._end[-1:]))
        records = records.drop_columns([TEMPERATURE])  # none was sampled
        for group in groups:
            batch.release(group.group_id)
        return [Batch(batch.source, records)]

    def _end_of_turn(self) -> list[int]:
        """Tokens that end a turn in the chat template, where prompts are chats and it can be
        told.
        """
        if self._template is None:
            return []
        try:
            form = ChatFormat(self._tokenizer, **self._template.options)
        except ChatError:
            return []
        return form.encode(form.ending)

    def _demonstrated(self, batch: Batch) -> list[EndedRollout | str]:
        """For each row its rollout, or its failure as text."""
        most = self._context_tokens
        texts = batch.records.column(PROMPT).to_pylist()
        prompts = encode(
            self._tokenizer,
            texts,
            RowLayout.of_rows(batch.records),
            node=self._node,
            template=self._template,
            context_tokens=most,
            vocabulary=self._vocabulary,
        )
        answers = batch.records.column(self._answer).to_pylist()
        tokens = text_ids(self._tokenizer, [answer or "" for answer in answers])
        return [self._rollout(*row) for row in zip(prompts, answers, tokens, strict=True)]

    def _rollout(self, prompt: Any, answer: str | None, tokens: list[int]) -> EndedRollout | str:
        if isinstance(prompt, str):
            return prompt
        if answer is None:
            why = f"the answer is null in column '{self._answer}'; give every row a text"
            return str(RolloutFailure(self._node, UNUSABLE, why))
        answered = RolloutTokens.given(np.array([*tokens, *self._end]), mask=True)
        whole = RolloutTokens.joined([RolloutTokens.given(prompt), answered])
        if len(whole) > self._context_tokens:
            why = (
                f"the demonstration is too long: it has {len(whole)} tokens and the context has"
                f" room for {self._context_tokens}; shorten it, or raise context_tokens"
            )
            return str(RolloutFailure(self._node, TOO_LONG, why))
        if (fault := unknown_token(whole.ids, self._vocabulary, self._node)) is not None:
            return fault
        return EndedRollout(tokens=whole, start=len(prompt), reason=STOPPED, text=answer)
