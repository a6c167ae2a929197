"""An engine that replays padded steps and reads late which rows ended gives the rollouts of one
that does neither.
"""

from dataclasses import replace

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from operators.engine import decode
from operators.engine.build import adapt
from operators.engine.decode import Engine
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG, PromptStart
from operators.engine.pages import AHEAD
from operators.engine.parallel.lockstep import state_of
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings

VOCABULARY = 32
ENDS = [1, 7]


def make_engine(model, *, on_gpu_terms, **options):
    proof = adapt(model, "tiny")
    settings = {
        "slots": 12,
        "context_tokens": 100,
        "sampling": Sampling(),
        "end_tokens": ENDS,
        **options,
    }
    return Engine(
        model,
        kernel=proof.kernel,
        token_bytes=proof.token_bytes,
        graphs=on_gpu_terms,
        lag=int(on_gpu_terms),
        **{"cache_bytes": 1 << 24, **settings},
    )


def starts(count=9):
    rng = np.random.default_rng(2)
    return [
        PromptStart(
            prompt=rng.integers(2, VOCABULARY, 3 + 7 * (i % 4)),
            limit=60 + 3 * i,
            tickets=range(3 * i, 3 * i + 3),
            seeds=range(50 + 3 * i, 53 + 3 * i),
        )
        for i in range(count)
    ]


def drive(engine, given, between=None):
    """By ticket: tokens, log-probabilities, versions, reason, text; and the tokens that the engine
    says it drew.
    """
    rows, waiting, step = {}, list(given), 0
    while waiting or engine.live:
        extra = between(engine, step) if between is not None else ()
        begin = [waiting.pop(0)] if waiting and engine.free >= 3 and engine.spare_pages >= 4 else []
        step += 1
        for row in (*(extra or ()), *engine.step(begin)):
            assert row.ticket not in rows
            tokens = row.tokens
            rows[row.ticket] = (
                tokens.ids.tolist(),
                tokens.logprobs,
                tokens.versions.tolist(),
                row.reason,
                row.text,
            )
    return rows


def check_alike(one, two):
    assert one.keys() == two.keys()
    for ticket in one:
        for at in (0, 2, 3, 4):
            assert one[ticket][at] == two[ticket][at]
        np.testing.assert_allclose(one[ticket][1], two[ticket][1], atol=1e-5)


def both(make_model, given=None, between=None, **options):
    engines = [make_engine(make_model(), on_gpu_terms=terms, **options) for terms in (False, True)]
    found = [drive(engine, given or starts(), between) for engine in engines]
    check_alike(*found)
    assert engines[0].drawn == engines[1].drawn
    return found[1]


def test_rows_that_end_by_a_token_or_by_length_are_the_same(make_model):
    rows = both(make_model)
    assert {row[3] for row in rows.values()} == {STOPPED, TOO_LONG} and len(rows) == 27


def test_stop_strings_are_found_and_cut_the_same(make_model, tokenizer):
    stop = StopStrings(tokenizer, ("ab", "q", "x."))
    rows = both(make_model, end_tokens=[], stop=stop, sampling=Sampling(temperature=2.0))
    assert any(row[4] is not None for row in rows.values())


def test_rows_that_are_parked_for_want_of_pages_go_on_the_same(make_model):
    token_bytes = adapt(make_model(), "tiny").token_bytes
    parked = []

    def between(engine, _):
        parked.append(len(engine.parked))

    both(make_model, between=between, cache_bytes=16 * token_bytes * 24, end_tokens=[1])
    assert max(parked) > 0


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_versions_are_the_same_through_updates(make_model, on_update):
    others = {10: (1, make_model(seed=1)), 25: (2, make_model(seed=2))}

    def between(engine, step):
        if step in others:
            version, model = others[step]
            for name, tensor in model.named_parameters():
                engine.tensors[name].copy_(tensor)
            engine.adopted(version)

    rows = both(make_model, between=between, on_update=on_update, end_tokens=[1], slots=32)
    assert {0, 1, 2} <= {version for row in rows.values() for version in row[2]}


def test_aborted_rows_are_the_same_and_none_that_ended_is_called_aborted(make_model):
    def between(engine, step):
        return engine.abort(range(0, 27, 2)) if step == 12 else None

    rows = both(make_model, between=between, slots=32)
    aborted = [row for row in rows.values() if row[3] == ABORTED]
    assert aborted and all(row[0][-1] not in ENDS for row in aborted)


def test_greedy_rows_are_the_same_too(make_model):
    both(make_model, sampling=Sampling(temperature=0))


def test_rows_that_are_sampled_each_in_its_own_way_are_the_same(make_model):
    knobs = [
        None,
        Sampling(temperature=0.7),
        Sampling(temperature=0),
        Sampling(top_k=3),
        Sampling(top_p=0.8, min_p=0.01),
        Sampling(top_k=70, temperature=1.5),
        Sampling(repetition_penalty=1.3, top_p=0.9),
    ]
    given = [replace(start, sampling=knobs[i % 7]) for i, start in enumerate(starts(14))]
    both(make_model, given)
    both(make_model, given[:6])


def test_what_truncation_left_and_what_might_have_been_drawn_are_the_same(make_model):
    given = [replace(start, alternatives=2 * (i % 2)) for i, start in enumerate(starts())]
    notes = []
    for terms in (False, True):
        engine = make_engine(
            make_model(), on_gpu_terms=terms, sampling=Sampling(top_k=4), record_mask=True
        )
        masks, likeliest = {}, {}

        def between(engine, _, masks=masks, likeliest=likeliest):
            for ticket in engine.rows.ticket[: engine.rows.n].tolist():
                likeliest[ticket] = [[i for i, _ in row] for row in engine.alternatives.of(ticket)]
                mask = engine.progress(ticket).tokens.sampling_mask
                masks[ticket] = [ids.tolist() for ids in mask.lists()]

        drive(engine, given, between)
        notes.append((masks, likeliest))
    for one, two in zip(*notes, strict=True):
        for ticket in one.keys() & two.keys():
            shorter = min(len(one[ticket]), len(two[ticket]))
            assert one[ticket][:shorter] == two[ticket][:shorter]
    assert any(any(row) for row in notes[1][1].values())


def test_prefixes_longer_than_a_replayed_step_takes_are_computed_beside_it_the_same(make_model):
    rng = np.random.default_rng(3)
    given = [
        PromptStart(
            prompt=rng.integers(2, VOCABULARY, length),
            limit=length + 20,
            tickets=range(3 * i, 3 * i + 3),
            seeds=range(3 * i, 3 * i + 3),
            sampling=Sampling(temperature=0.6) if i % 2 else None,
        )
        for i, length in enumerate((20, AHEAD + 30, 7, AHEAD, AHEAD + 1, 40))
    ]
    rows = both(
        lambda: make_model(max_position_embeddings=1024), given, context_tokens=600, end_tokens=[1]
    )
    assert len(rows) == 18


class NoOperators(TorchDispatchMode):
    """Whatever asks torch for anything fails."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_what_ranks_compare_before_a_step_asks_no_device_and_tells_other_tokens_apart(
    make_model, monkeypatch
):
    monkeypatch.setattr(decode, "CHECK_STEPS", 4)
    engines = [
        make_engine(make_model(), on_gpu_terms=True, is_checked=True, end_tokens=[]) for _ in "ab"
    ]
    states = []
    for step in range(12):
        if step == 5:
            engines[1].rows.last[0] += 1
        for engine in engines:
            engine.step(starts(2) if step == 0 else [])
        with NoOperators():
            states.append([state_of(engine) for engine in engines])
    alike = [one == two for one, two in states]
    assert alike == [True] * 8 + [False] * 4, "the checksum of step 8 has come in step 9"
