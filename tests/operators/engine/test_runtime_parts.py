"""A generator that is killed in the middle of long rollouts: the next one goes on where it was,
token for token.
"""

import numpy as np
import pyarrow as pa
import pytest
from replaying import recomputed
from rigs.ending import at_end
from rigs.operators import make_context
from test_runtime import COLUMNS, FakePlane, letters, prompts, rows_of, run_dry

from dataflow.folder.ledger import Ledger
from dataflow.folder.partial_rollouts import PartialRollout, PartialRow
from dataflow.folder.run_folder import RunFolder
from dataflow.model import Model
from dataflow.records import SAMPLING_MASK
from dataflow.runtime import Batch, Context
from dataflow.staleness import Bound
from operators.engine.sampler import Sampling
from operators.generation.groups import partial_rollouts_of
from operators.generator import Generator
from transport.life import Life

SEGMENT = 8


TEXTS = letters(6, seed=3)


class Site:
    """A run folder, and the processes of a generator that follow one another in it. None of them is
    closed: that is how a kill leaves them.
    """

    def __init__(self, policy, path, sources=("train",)):
        self.policy, self.folder = policy, RunFolder.create(path, "t")
        self.ledger = Ledger.create(self.folder.ledger, {"trainer": list(sources)})
        at_end(self.ledger.close)
        self.sources, self.attempt, self.alive = sources, -1, []

    def process(self, replica=0, context=None, **knobs):
        self.attempt += 1
        knobs = {"group_size": 4, "max_tokens": 44, "slots": 16, "segment_tokens": SEGMENT, **knobs}
        made = Generator(Model(str(self.policy)), **knobs).build(
            make_context(
                node="generator",
                replica=replica,
                life=Life(attempt=self.attempt),
                folder=self.folder,
                ledger=self.ledger,
                columns=dict.fromkeys(self.sources, COLUMNS),
                **(context or {}),
            )
        )
        self.alive.append(made)
        return made

    def issue(self, texts, source="train", **more):
        self.ledger.issue(source, [(i, f"task{i}") for i in range(len(texts))])
        return prompts(texts, source, **more)

    @property
    def files(self):
        folder = self.folder.finished("generator")
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def site(folder, tmp_path):
    return Site(folder, tmp_path)


@pytest.fixture
def undisturbed(folder):
    def made(texts=TEXTS, **knobs):
        knobs = {"group_size": 4, "max_tokens": 44, "slots": 16, "segment_tokens": SEGMENT, **knobs}
        runtime = Generator(Model(str(folder)), **knobs).build(Context(node="generator"))
        runtime.push(prompts(texts))
        return by_id(rows_of(run_dry(runtime)))

    return made


def by_id(rows):
    return {row["rollout_id"]: row for row in rows}


def unsent(texts, rows):
    """The prompts again, of groups that had not left."""
    done = {row["group_id"] for row in rows}
    batch = prompts(texts)
    keep = [i for i in range(len(texts)) if i not in done]
    return type(batch)(batch.source, batch.records.take(pa.array(keep, pa.int64())))


def segments(runtime, count):
    return [row for _ in range(count) for row in rows_of(runtime.work() or [])]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, row in found.items():
        same = {name: value for name, value in row.items() if name != "logprobs"}
        assert same == {name: value for name, value in expected[key].items() if name != "logprobs"}
        np.testing.assert_allclose(row["logprobs"], expected[key]["logprobs"], atol=1e-5)


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "stop": ("ab", "z"), "repetition_penalty": 1.2},
        pytest.param({"top_k": 5, "sampling_mask": True, "slots": 5}, marks=pytest.mark.slow),
    ],
    ids=["greedy", "sampled", "with stops", "masked, few slots"],
)
def test_after_kills_the_rollouts_are_those_of_an_undisturbed_generator(site, undisturbed, knobs):
    expected = undisturbed(**knobs)
    rows, batch, drawn, recalled = [], site.issue(TEXTS), [], []
    for kills in (3, 2, 4, 60):
        runtime = site.process(**knobs)
        runtime.push(batch)
        rows += segments(runtime, kills)
        drawn.append(runtime.engine.drawn)
        recalled.append(runtime.status()["recalled"])
        batch = unsent(TEXTS, rows)
        if not batch.records.num_rows:
            break
    assert_same(by_id(rows), expected)
    assert len(drawn) > 2 and sum(recalled) > 10 * SEGMENT
    twice = sum(drawn) - sum(sum(row["mask"]) for row in expected.values())
    assert 0 <= twice <= 3 * 16 * 2 * SEGMENT, "at most two segments of each slot are drawn again"


def test_what_is_kept_is_not_drawn_again(site, undisturbed):
    first, batch = site.process(), site.issue(TEXTS)
    first.push(batch)
    rows = segments(first, 4)
    assert first.status()["begun"] >= first.engine.live > 0
    second, again = site.process(), unsent(TEXTS, rows)
    second.push(again)
    made = rows_of(run_dry(second))
    assert second.status()["begun"] == 0
    recalled = second.status()["recalled"]
    assert recalled > SEGMENT
    assert second.engine.drawn + recalled == sum(sum(row["mask"]) for row in made)


def test_rollouts_that_ended_while_siblings_go_on_are_kept_with_their_text_and_reason(site):
    knobs = {"stop": ("b",), "max_tokens": 60, "group_size": 6}
    first = site.process(**knobs)
    first.push(site.issue(TEXTS))
    rows = segments(first, 3)
    ended = {
        (group.group_id, position): row
        for group, _ in first._tickets.values()
        for position, row in enumerate(group.rows)
        if position in group.written_ends
    }
    assert len(ended) > 3 and {row.reason for row in ended.values()} == {0}
    assert any(row.text is not None for row in ended.values())
    second = site.process(**knobs)
    second.push(unsent(TEXTS, rows))
    second.work()
    known = {(group.group_id, position): group for group, position in second._tickets.values()}
    assert not ended.keys() & known.keys(), "no row that ended has a slot"
    made = {(row["group_id"], row["position"]): row for row in rows_of(run_dry(second))}
    for key, row in ended.items():
        if key in made:
            assert (
                made[key]["tokens"] == row.tokens.ids.tolist()
                and made[key]["finish_reason"] == "stop"
            )
            assert row.text is None or made[key]["completion"] == row.text


def test_a_group_all_of_whose_rollouts_had_ended_leaves_at_once(site):
    """Two replicas each finished a part of it, and neither the whole."""
    one, other = site.process(0), site.process(1)
    batch = site.issue(TEXTS[:1])
    for runtime in (one, other):
        runtime.push(batch)
        runtime.work()
        (group,) = {id(group): group for group, _ in runtime._tickets.values()}.values()
        row = runtime.engine.progress(min(runtime._tickets))
        for position in (0, 1) if runtime is one else (2, 3):
            rollout = PartialRollout(
                begin=0, tokens=row.tokens[row.start :], finish_reason="length"
            )
            runtime._partial._files["train"].append([PartialRow(0, position, group.mark, rollout)])
    third = site.process()
    third.push(batch)
    rows = rows_of(third.work())
    assert [row["position"] for row in rows] == [0, 1, 2, 3] and third.engine.drawn == 0
    assert third.pending() == 0 and third.work() is None


def test_rollouts_that_end_within_a_segment_write_nothing(site):
    runtime = site.process(max_tokens=SEGMENT - 1, slots=7, group_size=3)
    runtime.push(site.issue(TEXTS * 4))
    assert len(rows_of(run_dry(runtime))) == 72
    assert site.files == []


def test_evaluations_write_nothing(site):
    batch = site.issue(TEXTS)
    at = batch.records.schema.get_field_index("round_size")
    records = batch.records.set_column(at, "round_size", pa.array([6] * 6, pa.int32()))
    runtime = site.process()
    runtime.push(type(batch)(batch.source, records))
    assert len(rows_of(run_dry(runtime))) == 24
    assert site.files == []


def test_files_go_with_the_outcomes_of_their_groups(site):
    first = site.process()
    first.push(site.issue(TEXTS))
    rows = segments(first, 4)
    assert site.files == ["0-0-0.train.parts"]
    second = site.process()
    second.push(unsent(TEXTS, rows))
    run_dry(second)
    assert site.files == ["0-0-0.train.parts", "0-1-0.train.parts"]
    for group in range(len(TEXTS)):
        second.forget("train", group)
    second.close()
    assert site.files == []


@pytest.mark.slow
def test_a_torn_file_costs_what_was_torn_and_no_more(site, undisturbed):
    first = site.process()
    first.push(site.issue(TEXTS))
    rows = segments(first, 4)
    (path,) = site.folder.finished("generator").iterdir()
    whole = path.read_bytes()
    recalled = []
    for share in (0.1, 0.6, 1.0):
        path.write_bytes(whole[: int(share * len(whole))])
        runtime = site.process()
        runtime.push(unsent(TEXTS, rows))
        made = rows_of(run_dry(runtime))
        assert_same(by_id([*rows, *made]), undisturbed())
        recalled.append(runtime.status()["recalled"])
        for left in site.folder.finished("generator").iterdir():
            left.unlink()
    assert recalled == sorted(recalled) and recalled[0] < recalled[1] < recalled[2]


def test_another_replica_goes_on_with_what_one_left(site, undisturbed):
    first = site.process(replica=0)
    first.push(site.issue(TEXTS))
    rows = segments(first, 3)
    halves = [unsent(TEXTS, rows).records.slice(0, 3), unsent(TEXTS, rows).records.slice(3)]
    for replica, half in zip((1, 2), halves, strict=True):
        runtime = site.process(replica=replica)
        runtime.push(Batch("train", half))
        rows += rows_of(run_dry(runtime))
        assert runtime.status()["recalled"] > 0
    assert_same(by_id(rows), undisturbed())


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_under_newer_weights_each_token_tells_which_drew_it(policy, site, make_model):
    models = {0: make_model(), 1: make_model(seed=1)}
    first = site.process(context={"reader": FakePlane(models)}, on_update=policy, temperature=1.5)
    first.push(site.issue(TEXTS))
    rows = segments(first, 3)
    second = site.process(
        context={"reader": FakePlane(models, at_poll={0: 1})}, on_update=policy, temperature=1.5
    )
    second.push(unsent(TEXTS, rows))
    made = rows_of(run_dry(second))
    assert second.status()["recalled"] > 0
    assert any(set(row["versions"]) == {-1, 0, 1} for row in made)
    for row in made:
        start = row["mask"].index(True)
        assert row["versions"][start:] == sorted(row["versions"][start:])
        expected = recomputed(
            models, row["tokens"], row["versions"], start, Sampling(temperature=1.5)
        )
        np.testing.assert_allclose(row["logprobs"][start:], expected, atol=1e-5)


def began(runtime):
    """Groups that have started, and those of them that go on with what an earlier process drew."""
    runtime.work()
    groups = {group.group_id: group for group, _ in runtime._tickets.values()}
    return set(groups), {number for number, group in groups.items() if group.order}


@pytest.mark.parametrize(
    ("was", "dropped_was", "now", "dropped", "go_on"),
    [
        (0, 2, 1, 2, {0, 1, 2, 3, 4, 5}),  # what was admitted stays so
        # step 3 trains group 4 under version 2, and version 0 is too old by then
        (0, 2, 2, 0, {0, 1, 2, 3}),
        (1, 0, 2, 0, {0, 1, 2, 3, 4, 5}),
        (3, 0, 2, 0, set()),  # version 3 was taken back
    ],
)
def test_rollouts_go_on_unless_their_oldest_token_would_be_too_old_or_its_version_is_gone(
    site, make_model, was, dropped_was, now, dropped, go_on
):
    models = {version: make_model() for version in (was, now)}
    bound = Bound(max_staleness=1, prompts_per_step=2)
    batch, found = site.issue(TEXTS), []
    for version, gone in ((was, dropped_was), (now, dropped)):
        plane = FakePlane(models, at_poll={0: version})
        plane.note = {"dropped": gone}
        runtime = site.process(
            context={"reader": plane, "bounds": {"train": bound}}, slots=32, temperature=0.3
        )
        runtime.push(batch)
        found.append(began(runtime))
    assert found[0] == (set(range(6)), set())
    assert found[1] == (set(range(6)), go_on)


def test_parts_of_another_seed_or_another_prompt_begin_anew(site):
    first = site.process()
    first.push(site.issue(TEXTS))
    segments(first, 3)
    for context, texts in (({"seed": 1}, TEXTS), ({}, [text + "a" for text in TEXTS]), ({}, TEXTS)):
        second = site.process(context=context)
        second.push(prompts(texts))
        second.work()
        assert (second.status()["recalled"] > 0) == (context == {} and texts == TEXTS)


def test_rollouts_of_both_engines_are_kept_in_parts_where_there_is_a_run(site):
    context = make_context(
        node="generator", folder=site.folder, ledger=site.ledger, columns={"train": COLUMNS}
    )
    for engine in ("native", "vllm"):
        declared = Generator(Model("somewhere"), engine=engine)
        assert partial_rollouts_of(declared, context) is not None
        assert partial_rollouts_of(declared, make_context(node="generator")) is None


def test_little_memory_makes_recalled_rollouts_wait_and_changes_none(site, undisturbed):
    first = site.process()
    first.push(site.issue(TEXTS))
    rows = segments(first, 4)
    tight = {"context_tokens": 56, "cache_bytes": 6 * 16 * first.engine.token_bytes}
    second = site.process(**tight)
    second.push(unsent(TEXTS, rows))
    parked = []
    while (made := second.work()) is not None:
        rows += rows_of(made)
        parked.append(second.status()["parked"])
    assert max(parked) > 1 and second.status()["recalled"] > 0
    assert_same(by_id(rows), undisturbed())


def test_the_mask_is_kept_token_by_token(site):
    knobs = {"top_k": 3, "sampling_mask": True}
    first = site.process(**knobs)
    first.push(site.issue(TEXTS))
    rows = segments(first, 3)
    second = site.process(**knobs)
    second.push(unsent(TEXTS, rows))
    for row in rows_of(run_dry(second)):
        for token, drawn, left in zip(row["tokens"], row["mask"], row[SAMPLING_MASK], strict=True):
            assert (token in left and len(left) == 3) if drawn else left is None
    assert second.status()["recalled"] > 0


def test_flags_that_are_read_late_let_no_token_after_the_end_be_kept(make_model):
    """As on a GPU: a row in the batch may have drawn its end one step ago."""
    from operators.engine import build
    from operators.engine.decode import Engine
    from operators.engine.interface import PromptStart

    found = build.adapt(model := make_model(), "tiny")
    engine = Engine(
        model,
        slots=16,
        context_tokens=64,
        end_tokens=[1],
        sampling=Sampling(),
        lag=1,
        token_bytes=found.token_bytes,
    )
    starts = [
        PromptStart(prompt=np.array([2 + i, 3]), limit=60, tickets=[i], seeds=[i])
        for i in range(16)
    ]
    seen: dict[int, list[int]] = {}
    whole: dict[int, list[int]] = {}
    engine.step(starts)
    while engine.live:
        for ticket, stretch in engine.new_tokens(lambda ticket: len(seen.get(ticket, [])), 1):
            assert stretch.begin == len(seen.setdefault(ticket, []))
            seen[ticket] += stretch.tokens.ids.tolist()
        for row in engine.step():
            whole[row.ticket] = row.tokens.ids[2:].tolist()
    assert len(whole) == 16 and any(tokens[-1] == 1 for tokens in whole.values())
    for ticket, tokens in seen.items():
        assert tokens == whole[ticket][: len(tokens)] and 1 not in tokens
