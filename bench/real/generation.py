"""One step's rollouts by a generator alone: our engine, vLLM behind the same methods, and
`model.generate`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.real.task import Task
from bench.report import Figure
from dataflow.records import AnyArray
from dataflow.runtime import Context, DeviceShare
from operators import Generator
from operators.engine.interface import PromptStart

Counts = dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """A step's rollouts."""

    seconds: float
    tokens: int
    """Of all completions, their end tokens among them."""


def prompt_ids(task: Task, tokenizer: Any, groups: int) -> list[AnyArray]:
    """The first prompts of training as the generator lays them out, int64 [tokens] each."""
    rows = task.train[:groups]
    if not task.chat:
        return [np.array(tokenizer.encode(row["prompt"]), np.int64) for row in rows]
    return [
        np.array(tokenizer.encode(laid_out(tokenizer, row["prompt"]), add_special_tokens=False))
        for row in rows
    ]


def laid_out(tokenizer: Any, prompt: str) -> str:
    """A user's message in the model's template, up to where its answer begins."""
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


class EngineStep:
    """Rollouts of one step by an engine with the methods of operators.engine.decode.Engine."""

    def __init__(
        self, task: Task, generator: Generator, threads: int, layers: int | None = None
    ) -> None:
        """layers: of the model, only the first so many; None: all. Raises ModelError."""
        from operators.engine.build import build_native, make_engine
        from operators.models.loading import load_merged

        context = Context(node="bench", devices=DeviceShare(threads=threads))
        if layers is None:
            built = make_engine(generator, context)
        else:
            model: Any = load_merged(generator.model, device="cpu")[0]
            model.model.layers = model.model.layers[:layers]
            model.config.num_hidden_layers = layers
            built = build_native(generator, context, model)
        self.engine: Any = built.engine
        self._task, self._threads = task, threads
        self._prompts = prompt_ids(task, built.tokenizer, task.prompts_per_step)

    def run(self, seed: int) -> Drawn:
        """All rollouts of a step, which start at once."""
        torch.set_num_threads(self._threads)
        size, tokens = self._task.group_size, 0
        self.engine.pages.forget() if hasattr(self.engine, "pages") else None
        starts = []
        for group, prompt in enumerate(self._prompts):
            tickets = range(group * size, (group + 1) * size)
            seeds = [seed * 1_000_003 + ticket for ticket in tickets]
            limit = len(prompt) + self._task.max_tokens
            starts.append(PromptStart(prompt=prompt, limit=limit, tickets=tickets, seeds=seeds))
        began = time.perf_counter()
        while starts or self.engine.live:
            ended = self.engine.step(starts)
            starts = []
            tokens += sum(len(row.tokens) - row.start for row in ended)
        return Drawn(time.perf_counter() - began, tokens)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class HfStep:
    """The same by transformers' `model.generate`: one batch, prompts repeated and padded at the
    left.
    """

    def __init__(self, task: Task, folder: str, threads: int) -> None:
        """Load the model."""
        from bench.end_to_end.plain_loop import load

        torch.set_num_threads(threads)
        self._task = task
        self._model, tokenizer = load(folder)
        self._model.to(getattr(torch, task.dtype)).eval().requires_grad_(False)
        ids = prompt_ids(task, tokenizer, task.prompts_per_step)
        width = max(map(len, ids))
        self._end = tokenizer.eos_token_id
        pad = self._end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        rows = [
            ([pad] * (width - len(prompt)) + prompt.tolist(), len(prompt))
            for prompt in ids
            for _ in range(task.group_size)
        ]
        self._ids = torch.tensor([row for row, _ in rows])
        self._mask = torch.tensor([[0] * (width - size) + [1] * size for _, size in rows])
        self._pad = pad

    def run(self, seed: int) -> Drawn:
        """All rollouts of a step."""
        torch.manual_seed(seed)
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                self._ids,
                attention_mask=self._mask,
                max_new_tokens=self._task.max_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=self._pad,
            )
        seconds = time.perf_counter() - began
        drawn = output[:, self._ids.shape[1] :]
        return Drawn(seconds, sum(completion_tokens(row, self._end) for row in drawn.tolist()))

    def close(self) -> None:
        """Nothing is held beside the model."""


def completion_tokens(tokens: Sequence[int], end: int) -> int:
    """Tokens of a completion up to its end token, that included.

    >>> completion_tokens([5, 6, 2, 0, 0], 2), completion_tokens([5, 6], 2)
    (3, 2)
    """
    return tokens.index(end) + 1 if end in tokens else len(tokens)


def paced(step: EngineStep | HfStep, task: Task, repeats: int) -> dict[str, Figure]:
    """Medians over the repeats, after one that does not count."""
    step.run(0)
    drawn = [step.run(seed) for seed in range(1, repeats + 1)]
    return {
        "seconds": statistics.median(draw.seconds for draw in drawn),
        "rollouts_per_s": statistics.median(
            task.rollouts_per_step / draw.seconds for draw in drawn
        ),
        "tokens_per_s": statistics.median(draw.tokens / draw.seconds for draw in drawn),
        "tokens": statistics.median(draw.tokens for draw in drawn),
        "repeats": repeats,
    }


COUNTED = (
    "prefill_s",
    "prefill_rows",
    "prefill_tokens",
    "decode_s",
    "decode_rows",
    "decode_computed",
    "decode_steps",
    "draw_s",
)


def stages(step: EngineStep) -> Counts:
    """Of one step's rollouts, seconds, tokens and rows of its prefill, its decoding and its
    drawing.

    decode_computed: rows that were computed; rollouts of a group that have drawn the same tokens
    are one.
    """
    engine, spent = step.engine, dict.fromkeys(COUNTED, 0.0)
    forward, draw = engine._forward, engine._draw

    def timed_forward(new: Any) -> Any:
        rows, alike = engine.rows.n, None if engine.fused is None else engine.rows.distinct()
        computed = rows if alike is None else len(alike[0])
        began = time.perf_counter()
        output = forward(new)
        stage = "prefill" if new else "decode"
        spent[f"{stage}_s"] += time.perf_counter() - began
        spent[f"{stage}_rows"] += len(new) if new else rows
        spent["decode_computed"] += 0 if new else computed
        spent["prefill_tokens"] += sum(prefix.new for prefix in new)
        spent["decode_steps"] += not new
        return output

    def timed_draw(*arguments: Any, **knobs: Any) -> Any:
        began = time.perf_counter()
        output = draw(*arguments, **knobs)
        spent["draw_s"] += time.perf_counter() - began
        return output

    with (
        mock.patch.object(engine, "_forward", timed_forward),
        mock.patch.object(engine, "_draw", timed_draw),
    ):
        spent["seconds"] = step.run(1).seconds
    return spent
