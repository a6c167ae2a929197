"""The generator at work: whole groups out, bounds kept, weights taken between steps, bad prompts as
rows.
"""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from replaying import recomputed, replayed
from rigs.columns import check_columns, whole
from rigs.operators import make_context

from dataflow.model import Model
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, SAMPLING_MASK_TYPE
from dataflow.runtime import Batch, Context
from dataflow.staleness import Bound
from operators.generator import Generator

COLUMNS = {**PROMPT_COLUMNS, "answer": pa.string()}


class FakePlane:
    """Weights that are offered at chosen polls, and a note; as the real plane, it turns only
    parameters into views.
    """

    def __init__(self, versions, at_poll=None):
        self.versions, self.at_poll = versions, at_poll or {0: 0}
        self.version, self.note, self.polls, self.offered = -1, {}, -1, None

    def __call__(self, tensors):
        self.tensors = tensors
        return self

    def poll(self):
        self.polls += 1
        self.offered = self.at_poll.get(self.polls, self.offered)
        return None if self.offered is None else SimpleNamespace(version=self.offered)

    def adopt(self):
        self.version, self.offered = self.offered, None
        new = dict(self.versions[self.version].named_parameters())
        assert new.keys() == self.tensors.keys()
        for name, tensor in self.tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.data = new[name].data.clone()
            else:
                tensor.copy_(new[name].data)
        return self.version


class FakeLedger:
    def __init__(self):
        self.calls = []

    def advance(self, source, group_ids, state):
        self.calls.append((source, list(group_ids), state))


def prompts(texts, source="train", *, first=0, sizes=None, min_version=0, acked=None):
    count = len(texts)
    records = pa.record_batch(
        {
            "group_id": pa.array(range(first, first + count), pa.int64()),
            "prompt_id": pa.array([f"task{i}" for i in range(count)]),
            "prompt": pa.array(texts, pa.string()),
            "group_size": pa.array(sizes or [0] * count, pa.int32()),
            "min_version": pa.array([min_version] * count, pa.int32()),
            "round_size": pa.array([0] * count, pa.int32()),
            "answer": pa.array([f"answer {first + i}" for i in range(count)]),
        }
    )
    told = whole(records, lambda: acked.append((source, first)) if acked is not None else None)
    return Batch(source, records, release=told)


@pytest.fixture
def build(folder):
    def make(*, context=None, **knobs):
        knobs = {"group_size": 4, "max_tokens": 12, "slots": 16, "segment_tokens": 8, **knobs}
        return Generator(Model(str(folder)), **knobs).build(
            make_context(node="generator", **(context or {}))
        )

    return make


def run_dry(runtime, turns=500):
    made = []
    for _ in range(turns):
        batches = runtime.work()
        if batches is None:
            return made
        made += batches
    raise AssertionError("the generator never came to rest")


def rows_of(batches, source="train"):
    return [row for batch in batches if batch.source == source for row in batch.records.to_pylist()]


def letters(count, seed=0):
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list("abcdefgh="), random.integers(1, 9))) for _ in range(count)]


def test_groups_leave_whole_with_the_promised_columns(build, tokenizer):
    runtime = build(max_tokens=30)
    texts = letters(25)
    runtime.push(prompts(texts))
    batches = run_dry(runtime)
    for batch in batches:
        check_columns(batch.records, {**COLUMNS, **ROLLOUT_COLUMNS})
        batch.records.validate(full=True)
        ids = batch.records.column("group_id").to_numpy().reshape(-1, 4)
        assert (ids == ids[:, :1]).all()
    rows = rows_of(batches)
    assert sorted(row["rollout_id"] for row in rows) == list(range(100))
    for row in rows:
        assert row["rollout_id"] == row["group_id"] * 4 + row["position"]
        assert row["answer"] == f"answer {row['group_id']}"
        start = len(texts[row["group_id"]])
        assert tokenizer.decode(row["tokens"][:start]) == row["prompt"]
        assert row["mask"] == [False] * start + [True] * (len(row["tokens"]) - start)
        wrote = row["tokens"][start:]
        assert row["completion"] == tokenizer.decode([t for t in wrote if t > 1])
        assert row["finish_reason"] == ("stop" if wrote[-1] == 1 else "length")
        assert 1 not in wrote[:-1] and (wrote[-1] == 1 or len(wrote) == 30)
        assert row["versions"] == [-1] * start + [0] * len(wrote)
        assert row["error"] is None and row["group_size"] == 4
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_a_reward_sees_the_special_tokens_where_it_asks_for_them(build, tokenizer):
    runtime = build(max_tokens=30, top_k=20, raw_completion=True)
    runtime.push(prompts(["abc", "d"], sizes=[40, 40]))
    batches = run_dry(runtime)
    for batch in batches:
        columns = {"raw_completion": pa.string(), "sampling_mask": SAMPLING_MASK_TYPE}
        check_columns(batch.records, {**COLUMNS, **ROLLOUT_COLUMNS, **columns})
    rows = rows_of(batches)
    for row in rows:
        wrote = row["tokens"][len(row["prompt"]) :]
        assert row["raw_completion"] == tokenizer.decode(wrote, skip_special_tokens=False)
        assert row["completion"] == tokenizer.decode(wrote, skip_special_tokens=True)
    assert any("<pad>" in row["raw_completion"] for row in rows)
    assert any(row["raw_completion"].endswith("<eos>") for row in rows)


def test_it_has_nothing_to_do_until_prompts_arrive(build):
    runtime = build()
    assert runtime.work() is None
    assert runtime.pending() == 0 and runtime.room() > 0
    runtime.push(prompts(["abc"]))
    assert runtime.pending() == 4
    assert runtime.work() is not None
    run_dry(runtime)
    assert runtime.pending() == 0 and runtime.work() is None


def test_an_arrival_is_acknowledged_with_the_last_of_its_groups(build):
    acked = []
    runtime = build(slots=4, max_tokens=6)
    runtime.push(prompts(["a", "b"], first=0, acked=acked))
    runtime.push(prompts(["c"], first=2, acked=acked))
    seen = []
    while (made := runtime.work()) is not None:
        seen += [row["group_id"] for row in rows_of(made)]
        assert [first for _, first in acked] == [
            first for first, last in ((0, 1), (2, 2)) if last in seen
        ]
    assert len(acked) == 2


def test_the_prompt_may_ask_for_its_own_group_size(build):
    runtime = build(slots=4, max_tokens=5)
    runtime.push(prompts(["ab", "cd", "ef"], sizes=[1, 0, 11]))
    rows = rows_of(run_dry(runtime))
    assert [sum(row["group_id"] == i for row in rows) for i in range(3)] == [1, 4, 11]
    assert {row["rollout_id"] for row in rows if row["group_id"] == 2} == set(range(22, 33))
    assert {row["group_size"] for row in rows if row["group_id"] == 1} == {4}


def test_training_groups_start_only_within_the_staleness_bound(build, make_model):
    plane, ledger = FakePlane({0: make_model(), 1: make_model(seed=1)}), FakeLedger()
    bounds = {"train": Bound(max_staleness=1, prompts_per_step=2, steps=4)}
    runtime = build(context={"reader": plane, "bounds": bounds, "ledger": ledger}, slots=64)
    runtime.push(prompts(letters(20)))

    def groups():
        return sorted({row["group_id"] for row in rows_of(run_dry(runtime))})

    assert groups() == [0, 1, 2, 3]
    plane.offered = 1
    assert groups() == [4, 5]
    plane.note = {"dropped": 1}
    assert groups() == [6]
    runtime.tell({"dropped": 2})
    assert groups() == [7]
    plane.note = {"dropped": 9}
    plane.versions[40], plane.offered = make_model(), 40
    assert groups() == list(range(8, 17)), "four steps of two groups, and nine dropped"
    assert [group for source, ids, state in ledger.calls for group in ids] == list(range(17))
    assert {(source, state) for source, _, state in ledger.calls} == {("train", "generating")}


def test_it_is_starved_while_prompts_wait_for_newer_weights_and_waits_where_there_are_none(
    build, make_model
):
    plane = FakePlane({0: make_model(), 1: make_model(seed=1)})
    bounds = {"train": Bound(max_staleness=0, prompts_per_step=2)}
    runtime = build(context={"reader": plane, "bounds": bounds}, slots=64)
    assert runtime.work() is None and not runtime.starved(), "it has no prompts"
    runtime.push(prompts(letters(4)))
    assert runtime.work() is not None and not runtime.starved(), "it draws those of the first step"
    run_dry(runtime)
    assert runtime.work() is None and runtime.starved(), "the others need version 1"
    plane.offered = 1
    run_dry(runtime)
    assert not runtime.starved() and not runtime.pending()


def test_evaluation_goes_first_and_waits_only_for_its_version(build, make_model):
    plane = FakePlane({0: make_model(), 1: make_model(seed=1)})
    bounds = {"train": Bound(max_staleness=0, prompts_per_step=4)}
    runtime = build(context={"reader": plane, "bounds": bounds}, slots=8)
    runtime.push(prompts(letters(4)))
    runtime.push(prompts(letters(4), "held_out"))
    runtime.push(prompts(letters(2), "held_out", first=4, min_version=1))
    runtime.work()
    order = [(group.source, group.group_id) for group, _ in runtime._tickets.values()]
    assert {source for source, _ in order} <= {"held_out"}
    rows = run_dry(runtime)
    assert not {row["group_id"] for row in rows_of(rows, "held_out")} & {4, 5}
    plane.offered = 1
    rows = rows_of(run_dry(runtime), "held_out")
    assert {row["group_id"] for row in rows} == {4, 5}
    assert {version for row in rows for version in row["versions"]} == {-1, 1}


def test_nothing_starts_before_the_first_version_has_come(build, make_model):
    plane = FakePlane({0: make_model()}, at_poll={3: 0})
    runtime = build(context={"reader": plane})
    runtime.push(prompts(["abc"]))
    assert [runtime.work() is None for _ in range(4)] == [True, True, True, False]


def test_a_version_that_the_plane_refuses_does_not_disturb_the_rollouts(
    build, make_model, monkeypatch
):
    plane = FakePlane({0: make_model()}, at_poll={0: 0, 5: 1})
    runtime = build(context={"reader": plane}, on_update="recompute")
    told = []
    adopted = runtime.engine.adopted
    monkeypatch.setattr(
        runtime.engine, "adopted", lambda version: (told.append(version), adopted(version))
    )
    take = plane.adopt
    monkeypatch.setattr(plane, "adopt", lambda: take() if plane.offered == 0 else plane.version)
    runtime.push(prompts(letters(3)))
    assert len(rows_of(run_dry(runtime))) == 12
    assert told == [0]
    assert plane.polls > 6


def test_the_engine_is_told_which_version_was_taken_though_another_one_was_offered_before(
    build, make_model, monkeypatch
):
    plane = FakePlane(
        {0: make_model(), 1: make_model(seed=1), 2: make_model(seed=2)}, at_poll={0: 0, 5: 1}
    )
    runtime = build(context={"reader": plane})
    told = []
    adopted = runtime.engine.adopted
    monkeypatch.setattr(
        runtime.engine, "adopted", lambda version: (told.append(version), adopted(version))
    )
    take = plane.adopt

    def take_newer():
        plane.offered += plane.offered == 1  # between the look and the taking
        return take()

    monkeypatch.setattr(plane, "adopt", take_newer)
    runtime.push(prompts(letters(3)))
    rows = rows_of(run_dry(runtime))
    assert told == [0, 2]
    assert {version for row in rows for version in row["versions"]} == {-1, 0, 2}


def test_after_a_trainers_restart_the_engine_is_told_its_version_though_it_is_no_higher(
    build, make_model, monkeypatch
):
    plane = FakePlane({0: make_model(), 1: make_model(seed=1)}, at_poll={0: 1, 5: 1, 9: 0})
    runtime = build(context={"reader": plane})
    told = []
    adopted = runtime.engine.adopted
    monkeypatch.setattr(
        runtime.engine, "adopted", lambda version: (told.append(version), adopted(version))
    )
    runtime.push(prompts(letters(3)))
    rows = rows_of(run_dry(runtime))
    assert told == [1, 1, 0]
    assert {version for row in rows for version in row["versions"]} == {-1, 0, 1}


@pytest.mark.parametrize(("policy", "oracle"), [("keep", replayed), ("recompute", recomputed)])
def test_weights_change_in_the_middle_of_rollouts_and_every_token_tells(
    policy, oracle, build, make_model
):
    models = {0: make_model(), 1: make_model(seed=1), 2: make_model(seed=2)}
    plane = FakePlane(models, at_poll={0: 0, 6: 1, 13: 2})
    runtime = build(
        context={"reader": plane}, slots=12, max_tokens=25, temperature=1.5, on_update=policy
    )
    runtime.push(prompts(letters(9)))
    rows = rows_of(run_dry(runtime))
    assert len(rows) == 36
    assert sum(len(set(row["versions"]) - {-1}) == 3 for row in rows) > 3
    from operators.engine.sampler import Sampling

    for row in rows:
        start = row["mask"].index(True)
        expected = oracle(models, row["tokens"], row["versions"], start, Sampling(temperature=1.5))
        np.testing.assert_allclose(row["logprobs"][start:], expected, atol=1e-5)
        assert not any(row["logprobs"][:start])


def test_the_same_seed_gives_the_same_rollouts_in_other_slots_and_another_does_not(build):
    def tokens(seed, **knobs):
        runtime = build(context={"seed": seed}, **knobs)
        runtime.push(prompts(letters(12)))
        return {row["rollout_id"]: row["tokens"] for row in rows_of(run_dry(runtime))}

    assert tokens(1) == tokens(1, slots=5, segment_tokens=1)
    assert tokens(1) != tokens(2)


def test_lengths_that_are_sent_on_are_those_that_were_started(build):
    """Nothing is thrown away at the end of a segment, so long rollouts are not fewer than they
    were.
    """
    whole = build(slots=256, segment_tokens=100, max_tokens=60)
    cut = build(slots=8, segment_tokens=2, max_tokens=60)
    lengths = []
    for runtime in (whole, cut):
        runtime.push(prompts(letters(30)))
        lengths.append({row["rollout_id"]: len(row["tokens"]) for row in rows_of(run_dry(runtime))})
    assert lengths[0] == lengths[1] and len(lengths[0]) == 120


def test_prompts_that_cannot_be_served_become_error_rows_beside_the_others(build):
    runtime = build(context_tokens=16, max_tokens=50)
    runtime.push(prompts(["ab", "", "x" * 16, None, "y" * 15]))
    rows = rows_of(run_dry(runtime))
    errors = {row["group_id"]: row["error"] for row in rows if row["finish_reason"] == "error"}
    assert set(errors) == {1, 2, 3}
    assert "empty" in errors[1] and "16 tokens" in errors[2] and "null" in errors[3]
    for row in rows:
        if row["error"]:
            assert row["tokens"] == row["mask"] == row["logprobs"] == row["versions"] == []
            assert row["completion"] == ""
    assert sorted(row["rollout_id"] for row in rows) == list(range(20))
    assert {len(row["tokens"]) for row in rows if row["group_id"] == 4} == {16}


def test_a_prompt_with_a_token_beyond_the_embeddings_becomes_error_rows_beside_the_others(build):
    runtime = build()
    runtime.tokenizer.add_tokens(["<new>"])
    runtime.push(prompts(["ab", "a<new>", "cd"]))
    errors = {row["group_id"]: row["error"] for row in rows_of(run_dry(runtime))}
    assert (
        errors[0] is errors[2] is None
        and f"but the model knows {runtime.engine.vocabulary}" in errors[1]
    )


def test_logits_that_are_not_finite_become_error_rows(build):
    runtime = build()
    with torch.no_grad():
        runtime.engine.model.lm_head.weight.fill_(float("nan"))
    runtime.engine.adopted(0)
    runtime.push(prompts(["abc"]))
    rows = rows_of(run_dry(runtime))
    assert len(rows) == 4
    assert all(row["finish_reason"] == "error" and "not finite" in row["error"] for row in rows)
    assert all(row["tokens"] == [2, 3, 4] and not any(row["mask"]) for row in rows)


def test_the_completion_ends_before_a_stop_string(build, tokenizer):
    runtime = build(stop=("a", "bc"), temperature=2.0, max_tokens=40)
    runtime.push(prompts(letters(20)))
    rows = rows_of(run_dry(runtime))
    assert len(rows) == 80
    stopped = [row for row in rows if row["finish_reason"] == "stop" and row["tokens"][-1] != 1]
    assert len(stopped) > 20
    for row in stopped:
        whole = tokenizer.decode(row["tokens"][row["mask"].index(True) :], skip_special_tokens=True)
        assert whole in (row["completion"] + "a", row["completion"] + "bc")


def test_chat_messages_are_laid_out_by_the_template(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}.{% endfor %}"
        "{% if add_generation_prompt %}a={% endif %}"
    )
    declared = Generator(Model(str(tmp_path)), group_size=4, slots=16, chat=True, max_tokens=3)
    runtime = declared.build(Context(node="generator"))
    runtime.push(prompts([json.dumps([{"role": "user", "content": "hi"}]), "no json"]))
    rows = rows_of(run_dry(runtime))
    good = [row for row in rows if row["group_id"] == 0]
    assert all(runtime.tokenizer.decode(row["tokens"][:7]) == "u=hi.a=" for row in good)
    assert all("not chat messages" in row["error"] for row in rows if row["group_id"] == 1)


def test_the_heartbeat_tells_version_load_and_rate(build):
    now = [0.0]
    runtime = build(context={"clock": lambda: now[0]}, slots=4, max_tokens=8, temperature=0.0)
    runtime.push(prompts(letters(6)))
    runtime.work()
    status = runtime.status()
    assert (
        status["version"] == 0 and status["tokens_per_s"] == 0.0 and 0 < status["slot_share"] <= 1
    )
    now[0] = 2.0
    rows = rows_of(run_dry(runtime))
    before, status = status["tokens"], runtime.status()
    assert (
        status["tokens_per_s"] == (status["tokens"] - before) / 2
        and status["waiting"] == status["active"] == 0
    )
    assert len(rows) > 0


def test_room_is_left_while_one_source_has_no_prompts(build):
    runtime = build(context={"columns": {"train": COLUMNS, "held_out": COLUMNS}})
    runtime.push(prompts(letters(300)))
    assert runtime.room() > 0
    runtime.push(prompts(letters(300), "held_out"))
    assert runtime.room() == 0
