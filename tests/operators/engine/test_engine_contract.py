"""What every engine promises: this project's own, and vLLM with one rank and with two, where
DATAFLOW_VLLM_PYTHON names an interpreter that has it. Versions reach vLLM's ranks as in a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaying import drive, recomputed, replayed

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.model import LoRA, Model
from dataflow.weight_ends import WeightSite
from operators.engine import build
from operators.engine.decode import Engine
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG, PromptStart
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.engine.vllm.engine import VllmEngine, VllmWeights
from operators.engine.vllm.process import PYTHON
from operators.models.adapters import Merged, adapted_layers
from transport.weights import FlatLayout, SharedMemory, WeightWriter

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
"""Largest difference between float32 log-probabilities and transformers'; vLLM's are 4e-5 off for
weights so large."""
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
"""Heads as wide as vLLM's kernels for processors ask."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
    "adapters": ("llama", {"tie_word_embeddings": True}),
}
ADAPTED = {"adapters": LoRA(3, alpha=6)}
"""By family, what alone is sent; its engine is vLLM's here."""
NEEDS_VLLM = (
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter"),
)


class Served:
    """An engine, and how versions get into it: a model's weights, all times so much; or adapters
    of which B is.
    """

    def __init__(
        self, kind: str, family: str, make_model: Callable[..., Any], folder: Path, knobs: Any
    ) -> None:
        name, changes = FAMILIES[family]
        self._make = lambda: make_model(name, **WIDE, **changes)
        self._lora = ADAPTED.get(family)
        knobs = {
            "slots": 8,
            "context_tokens": 128,
            "sampling": Sampling(),
            "end_tokens": [1],
            **knobs,
        }
        self.engine: Any
        if kind == "native":
            model = self._make()
            found = build.adapt(model, "tiny")
            self.engine = Engine(
                model,
                kernel=found.kernel,
                fused=found.fused,
                token_bytes=found.token_bytes,
                **knobs,
            )
            return
        model = self._make()
        model.save_pretrained(folder)
        address = f"ipc://{folder}/w.sock"
        folder.chmod(0o700)
        self._writer = WeightWriter(
            FlatLayout.of(self._sent(1.0)), SharedMemory(address, folder=folder)
        )
        site = WeightSite(
            executor="shared_memory",
            is_sharded=False,
            address=address,
            folder=str(folder),
            name="generator-0",
        )
        ranks = int(kind.removeprefix("vllm-"))
        declared = Model(str(folder), lora=self._lora)
        self.engine = VllmEngine(
            declared, python=os.environ[PYTHON], ranks=ranks, site=site, **knobs
        )
        self.weights = VllmWeights(self.engine)

    def policy(self, scale: float = 1.0) -> Any:
        model = self._make()
        if self._lora is not None:
            merged = Merged(model, adapted_layers(model, self._lora))
            for name, tensor in self._sent(scale).items():
                merged.tensors[name].copy_(tensor)
            merged.adopted()
            return model
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale)
        return model

    def _sent(self, scale: float) -> dict[str, torch.Tensor]:
        """By the trainer's names, what it sends of a version."""
        if self._lora is None:
            return dict(self.policy(scale).named_parameters())
        model, noise = self._make(), torch.Generator().manual_seed(1)
        empty = Merged(model, adapted_layers(model, self._lora)).tensors
        return {
            name: 0.3 * torch.randn(tensor.shape, generator=noise) * (scale if "_B" in name else 1)
            for name, tensor in empty.items()
        }

    def adopt(self, scale: float = 1.0) -> int:
        """The number of the version that is in use now."""
        version = self.engine.version + 1
        tensors = self._sent(scale)
        if isinstance(self.engine, Engine):
            for name, weight in tensors.items():
                self.engine.tensors[name].copy_(weight)
            self.engine.adopted(version)
            return version
        deadline = time.monotonic() + 60
        pending = not self._writer.publish(version, tensors)
        while self.weights.version != version:
            assert time.monotonic() < deadline, "no version came"
            self._writer.poll()
            if self.weights.poll() is not None:
                self.engine.adopted(self.weights.adopt())
        assert not pending or self._writer.pending is None
        return version

    def close(self) -> None:
        self.engine.close()
        if not isinstance(self.engine, Engine):
            self._writer.close()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Any]
) -> Iterator[Callable[..., Served]]:
    """Makes engines, one for each set of knobs."""
    made: dict[str, Served] = {}

    def make(kind: str, family: str = "llama", **knobs: Any) -> Served:
        key = repr((kind, family, knobs))
        if key not in made:
            folder = tmp_path_factory.mktemp("w")
            made[key] = Served(kind, family, make_model, folder, knobs)
        return made[key]

    yield make
    for one in made.values():
        one.close()


every_engine = pytest.mark.parametrize("kind", ["native", pytest.param("vllm-1", marks=NEEDS_VLLM)])
every_layout = pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("native", "llama"),
        ("native", "tied"),
        ("native", "experts"),
        *(
            pytest.param(f"vllm-{ranks}", family, marks=NEEDS_VLLM)
            for ranks in (1, 2)
            for family in FAMILIES
        ),
    ],
)


def prompts(count: int, seed: int = 0, lengths: tuple[int, int] = (3, 70)) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 31, int(rng.integers(*lengths))) for _ in range(count)]


def starts(
    tokens: list[Any], each: int = 1, most: int = 20, first: int = 0, **more: Any
) -> list[PromptStart]:
    return [
        PromptStart(
            prompt=prompt,
            limit=len(prompt) + most,
            tickets=range(first + i * each, first + (i + 1) * each),
            seeds=[7919 * (i * each + k) - 5 for k in range(each)],
            **more,
        )
        for i, prompt in enumerate(tokens)
    ]


@every_layout
def test_greedy_output_is_that_of_generate_with_each_version(
    served: Any, kind: str, family: str
) -> None:
    one, tokens = served(kind, family), prompts(8)
    for scale in (1.0, 1.3):
        one.adopt(scale)
        found = drive(one.engine, starts(tokens, sampling=Sampling(temperature=0.0)))
        model = one.policy(scale)
        for i, prompt in enumerate(tokens):
            kept = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
            expected = model.generate(torch.from_numpy(prompt)[None], **kept)[0]
            assert found[i]["tokens"].tolist() == expected.tolist()
            assert found[i]["reason"] == (STOPPED if expected[-1] == 1 else TOO_LONG)
            assert not found[i]["logprobs"].any()


@every_layout
def test_tokens_across_updates_in_flight_come_from_the_version_that_they_name(
    served: Any, kind: str, family: str
) -> None:
    one, tokens = served(kind, family), prompts(2, seed=2)
    scales = {one.adopt(1.0): 1.0}

    def at_step(step: int) -> None:
        if step in (6, 13):
            scale = 1.15 if step == 6 else 0.9
            scales[one.adopt(scale)] = scale

    found = drive(one.engine, starts(tokens, each=4, most=30), at_step)
    check(one, found, scales, replayed)
    assert 3 in {len(set(row["versions"][row["start"] :].tolist())) for row in found.values()}


def check(one: Served, found: Any, scales: dict[int, float], reference: Any) -> None:
    models = {version: one.policy(scale) for version, scale in scales.items()}
    for row in found.values():
        start, versions = row["start"], row["versions"]
        assert (np.diff(versions[start:]) >= 0).all() and (versions[:start] == -1).all()
        expected = reference(models, row["tokens"], versions, start)
        np.testing.assert_allclose(row["logprobs"][start:], expected, atol=EXACT)


@every_engine
def test_recompute_prefills_unfinished_rollouts_under_new_weights(served: Any, kind: str) -> None:
    one, tokens = served(kind, on_update="recompute"), prompts(2, seed=2)
    scales = {one.adopt(1.0): 1.0}

    def at_step(step: int) -> None:
        if step == 6:
            scales[one.adopt(1.15)] = 1.15

    check(one, drive(one.engine, starts(tokens, each=4, most=30), at_step), scales, recomputed)


@every_engine
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(min_p=0.1, repetition_penalty=1.2),
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    served: Any, kind: str, sampling: Sampling
) -> None:
    one, tokens = served(kind), prompts(3, seed=1)
    one.adopt()
    for row in drive(one.engine, starts(tokens, each=4, sampling=sampling)).values():
        ids, start = torch.from_numpy(row["tokens"].astype(np.int64)), row["start"]
        logits = one.policy()(input_ids=ids[None]).logits[0, start - 1 : -1]
        expected = distribution(logits, ids, start, sampling).gather(1, ids[start:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"][start:], expected.detach(), atol=EXACT)


def distribution(logits: Any, ids: Any, start: int, sampling: Sampling) -> Any:
    """Log-probabilities [k, V] in float64, by the definitions of the knobs."""
    logits = logits.double().clone()
    for i in range(len(logits)):
        seen = ids[: start + i].unique()
        old = logits[i, seen]
        logits[i, seen] = torch.where(
            old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty
        )
    logits = logits / sampling.temperature
    probabilities = logits.softmax(-1)
    logits[probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True)] = -torch.inf
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    ordered, order = logits.softmax(-1).sort(descending=True)
    out = torch.zeros_like(logits, dtype=torch.bool).scatter(
        1, order, ordered.cumsum(-1) - ordered >= sampling.top_p
    )
    return logits.masked_fill(out, -torch.inf).log_softmax(-1)


@every_engine
def test_draws_are_as_frequent_as_they_are_likely(served: Any, kind: str) -> None:
    one, (prompt,) = served(kind), prompts(1, seed=9)
    one.adopt(0.6)
    counts, rounds = np.zeros(32), 250
    for i in range(rounds):
        begin = PromptStart(
            prompt=prompt,
            limit=len(prompt) + 1,
            tickets=range(8),
            seeds=[104729 * (8 * i + k) + 11 for k in range(8)],
        )
        for row in drive(one.engine, [begin]).values():
            counts[row["tokens"][-1]] += 1
    logits = one.policy(0.6)(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1]
    expected = logits.double().softmax(-1).numpy() * 8 * rounds
    seen = expected >= 5
    joined = (
        np.append(counts[seen], counts[~seen].sum()),
        np.append(expected[seen], expected[~seen].sum()),
    )
    chi2 = ((joined[0] - joined[1]) ** 2 / joined[1].clip(1e-9)).sum()
    freedom = len(joined[0]) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)  # about one in a million by chance


@every_engine
@pytest.mark.parametrize("waits", [True, False], ids=["asked_before", "asked_after"])
def test_a_rollout_that_begins_after_an_update_shares_no_prefix_of_older_weights(
    served: Any, kind: str, waits: bool
) -> None:
    one, (prompt,) = served(kind), prompts(1, seed=6, lengths=(95, 96))
    scales = {one.adopt(1.0): 1.0}
    every = starts([prompt], each=8, most=30)[0]
    early = every if waits else replace(every, tickets=every.tickets[:2], seeds=every.seeds[:2])
    late = [] if waits else [replace(every, tickets=every.tickets[2:], seeds=every.seeds[2:])]
    one.engine.step([early])
    scales[one.adopt(1.2)] = 1.2
    found = drive(one.engine, late)
    assert len(found) == 8
    if not waits:
        assert {int(row["versions"][95]) for row in found.values()} == set(scales)
    check(one, found, scales, replayed)


@every_engine
def test_a_rollout_draws_the_same_tokens_alone_and_in_company(served: Any, kind: str) -> None:
    one, tokens = served(kind), prompts(4, seed=3)
    one.adopt()
    every = starts(tokens, each=2)
    company = drive(one.engine, every)
    for start in every:
        alone = drive(one.engine, [start])
        for ticket in start.tickets:
            assert alone[ticket]["tokens"].tolist() == company[ticket]["tokens"].tolist()
    assert len({row["tokens"].tobytes() for row in company.values()}) > 4


@every_engine
def test_a_cache_that_holds_fewer_rollouts_than_slots_changes_no_token(
    served: Any, kind: str
) -> None:
    tokens = prompts(8, seed=8, lengths=(30, 40))
    roomy, tight = served(kind), served(kind, cache_bytes=600_000)
    for one in (roomy, tight):
        one.adopt()
    expected = drive(roomy.engine, starts(tokens, most=60))
    found = drive(tight.engine, starts(tokens, most=60))
    assert {t: row["tokens"].tolist() for t, row in found.items()} == {
        t: row["tokens"].tolist() for t, row in expected.items()
    }


@every_engine
def test_an_aborted_rollout_keeps_its_partial_output_and_the_others_go_on(
    served: Any, kind: str
) -> None:
    one, tokens = served(kind), prompts(1, seed=4)
    one.adopt()
    (whole,) = starts(tokens, each=2, most=40)
    expected = drive(one.engine, [whole])
    longest = max(expected, key=lambda ticket: len(expected[ticket]["tokens"]))
    one.engine.step([whole])
    for _ in range(5):
        one.engine.step()
    (cut,) = one.engine.abort([longest])
    length = len(cut.tokens)
    assert cut.reason == ABORTED and len(tokens[0]) < length < len(expected[longest]["tokens"])
    assert cut.tokens.ids.tolist() == expected[longest]["tokens"][:length].tolist()
    rest = drive(one.engine, [])
    assert longest not in rest and one.engine.live == 0 and one.engine.free == 8


@every_engine
def test_a_rollout_goes_on_from_what_another_process_drew(served: Any, kind: str) -> None:
    """As after a crash: no token is lost or doubled, and what is drawn then is the model's."""
    one, tokens = served(kind), prompts(2, seed=5)
    version = one.adopt()
    (first, second) = starts(tokens, each=2, most=24)
    one.engine.step([first, second])
    for _ in range(8):
        one.engine.step()
    grown = dict(one.engine.new_tokens(lambda ticket: 0, 4))
    one.engine.abort(range(4))
    assert len(grown) >= 3 and all(
        isinstance(partial, PartialRollout) and partial.begin == 0 for partial in grown.values()
    )
    again = [
        replace(start, partial=[grown.get(ticket) for ticket in start.tickets])
        for start in (first, second)
    ]
    found = drive(one.engine, again)
    assert sorted(found) == [0, 1, 2, 3]
    for ticket, partial in grown.items():
        row, begin = found[ticket], found[ticket]["start"]
        kept = row["tokens"][begin : begin + len(partial.tokens)]
        assert kept.tolist() == partial.tokens.ids.tolist()
        assert len(row["tokens"]) - begin == 24 or row["tokens"][-1] == 1
    check(one, found, {version: 1.0}, replayed)


@every_engine
def test_a_stop_string_ends_a_rollout_and_frees_its_slot(
    served: Any, kind: str, tokenizer: Any
) -> None:
    one, tokens = served(kind), prompts(2, seed=5)
    one.adopt()
    plain = drive(one.engine, starts(tokens))
    text = tokenizer.decode(plain[0]["tokens"][plain[0]["start"] :], skip_special_tokens=True)
    stops = StopStrings(tokenizer, [text[4:7]])
    found = drive(one.engine, starts(tokens, stop=stops))[0]
    assert found["text"] == text[: text.find(text[4:7])] and found["reason"] == STOPPED
    assert (
        tokenizer.decode(found["tokens"][found["start"] :], skip_special_tokens=True)
        == found["text"] + text[4:7]
    )
    assert one.engine.free == 8
