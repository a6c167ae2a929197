"""The oracle: replays rows through transformers' own cache, each token under the weights it
names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from log_distribution import log_distribution

from operators.engine.decode import Engine
from operators.engine.interface import EndedRollout, PromptStart
from operators.engine.sampler import Sampling


@torch.no_grad()
def replayed(
    models: Mapping[int, Any],
    tokens: Any,
    versions: Any,
    start: int,
    sampling: Sampling | None = None,
) -> np.ndarray[Any, Any]:
    """Log-probabilities [tokens - start] of a completion, with keys and values kept from older
    versions.
    """
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
    found: list[float] = []
    cache, fed = None, 0
    for version, places in itertools.groupby(
        range(start, ids.shape[1]), lambda place: int(versions[place])
    ):
        drawn = ids[0, list(places)]
        until = start + len(found) + len(drawn) - 1
        output = models[version](input_ids=ids[:, fed:until], past_key_values=cache, use_cache=True)
        cache, fed = output.past_key_values, until
        logprobs = log_distribution(output.logits[0, -len(drawn) :], sampling or Sampling())
        found += logprobs.gather(1, drawn[:, None])[:, 0].tolist()
    return np.array(found)


def drive(
    engine: Engine, starts: Sequence[PromptStart], at_step: Any = lambda step: None
) -> dict[int, dict[str, Any]]:
    """Run an engine dry, starting prompts as soon as they fit; what each ticket got."""
    waiting = list(starts)
    found: dict[int, dict[str, Any]] = {}
    for step in range(10_000):
        at_step(step)
        now, free = [], engine.free
        pages = engine.spare_pages
        while waiting and len(waiting[0].tickets) <= free:
            idle = not now and not engine.live
            wanted = len(waiting[0].tickets)
            count, taken = engine.fitting(len(waiting[0].prompt), wanted, pages, idle=idle)
            if count < wanted and not (idle and count):
                break
            free, pages = free - count, pages - taken
            first = waiting.pop(0)
            now.append(replace(first, tickets=first.tickets[:count], seeds=first.seeds[:count]))
            if count < wanted:
                waiting.insert(
                    0, replace(first, tickets=first.tickets[count:], seeds=first.seeds[count:])
                )
                break
        if not now and not engine.live:
            return found
        _collect(engine.step(now), found)
    raise AssertionError("the engine did not come to an end")


@torch.no_grad()
def recomputed(
    models: Mapping[int, Any],
    tokens: Any,
    versions: Any,
    start: int,
    sampling: Sampling | None = None,
) -> np.ndarray[Any, Any]:
    """Log-probabilities [tokens - start] of a completion, each from a full pass under the weights
    it names.
    """
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
    found = np.zeros(ids.shape[1] - start)
    for version in {int(version) for version in versions[start:]}:
        logits = models[version](input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        logprobs = log_distribution(logits, sampling or Sampling()).gather(1, ids[0, start:, None])[
            :, 0
        ]
        mine = np.asarray(versions[start:]) == version
        found[mine] = logprobs.numpy()[mine]
    return found


def _collect(finished: Sequence[EndedRollout], found: dict[int, dict[str, Any]]) -> None:
    for row in finished:
        assert row.ticket not in found, "a rollout came out twice"
        mask = row.tokens.sampling_mask
        found[row.ticket] = {
            "tokens": row.tokens.ids,
            "logprobs": row.tokens.logprobs,
            "versions": row.tokens.versions,
            "start": row.start,
            "reason": row.reason,
            "text": row.text,
            "left": None if mask is None else mask[row.start :].lists(),
        }
