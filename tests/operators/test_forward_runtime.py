"""A forward operator's runtime: whole groups in their order, one micro-batch a slice, weights
between two rounds.
"""

import numpy as np
import pyarrow as pa
import pytest
import torch
from rigs.forwards import (
    Forwarding,
    Versions,
    forwarding,
    language_model,
    lists_of,
    plain_logprobs,
    rollouts,
    saved,
)
from rigs.heads import classifier

from dataflow import Model
from dataflow.errors import DeadlineError
from dataflow.limits import Limits
from dataflow.records import version_column
from dataflow.staleness import Bound
from operators import Logprobs, Values
from operators.forward_pass.build import Known, is_due, needed


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(str(saved(language_model(), tmp_path_factory.mktemp("policy"))), name="policy")


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = saved(classifier("Llama", "TokenClassification"), tmp_path_factory.mktemp("critic"))
    return Model(str(folder), name="critic", head="value")


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(language_model(seed=seed).named_parameters())


def ids(rig: Forwarding) -> list[list[int]]:
    return [list(dict.fromkeys(records.column("group_id").to_pylist())) for records in rig.out]


# Rows


def test_rows_that_failed_or_are_to_be_dropped_are_left_alone(policy_model: Model) -> None:
    failed = rollouts(0, ("b2", "c"), errors={0: "boom"}, drop=None)
    table = forwarding(Logprobs(policy_model)).run(
        failed, rollouts(1, ("x",), errors={0: "all of it"})
    )
    assert table.column("error").to_pylist() == ["boom", None, "all of it"]
    assert [row is None for row in lists_of(table, "ref_logprobs")] == [True, False, True]
    dropped = forwarding(Logprobs(policy_model)).run(rollouts(2, ("b2", "c"), drop="no signal"))
    assert lists_of(dropped, "ref_logprobs") == [None, None]
    assert lists_of(dropped, "error") == [None, None]


def test_rows_without_tokens_are_left_alone(policy_model: Model) -> None:
    group = rollouts(0, ("b2", "c"))
    tokens = pa.array([None, group.column("tokens")[1].as_py()], pa.list_(pa.int32()))
    group = group.set_column(group.schema.get_field_index("tokens"), "tokens", tokens)
    table = forwarding(Logprobs(policy_model)).run(group)
    assert [row is None for row in lists_of(table, "ref_logprobs")] == [True, False]


def test_nothing_but_the_new_columns_changes_and_rows_keep_their_order(policy_model: Model) -> None:
    groups = [
        rollouts(4),
        rollouts(1, ("b", "c c")),
        rollouts(9, ("d",), errors={0: "boom"}),
        rollouts(2),
    ]
    table = forwarding(Logprobs(policy_model, micro_batch_tokens=20)).run(*groups)
    new = ["ref_logprobs", version_column("ref_logprobs")]
    assert table.drop_columns(new).equals(pa.Table.from_batches(groups))
    assert [row is None for row in lists_of(table, new[1])] == [
        row is None for row in lists_of(table, new[0])
    ]


def test_a_rollout_in_which_the_policy_chose_nothing_has_only_zeros(policy_model: Model) -> None:
    group = rollouts(0, ("b",))
    none = pa.array([[False] * len(group.column("tokens")[0])], pa.list_(pa.bool_()))
    group = group.set_column(group.schema.get_field_index("mask"), "mask", none)
    (found,) = lists_of(forwarding(Logprobs(policy_model)).run(group), "ref_logprobs")
    assert found == [0.0] * len(group.column("tokens")[0])


# Slices


def test_a_slice_is_one_micro_batch_and_a_group_leaves_when_its_last_one_is_done(
    policy_model: Model,
) -> None:
    rig = forwarding(Logprobs(policy_model, micro_batch_tokens=10))
    rig.push(rollouts(0, ("abcdef", "ghijkl", "mnopqr")))
    left = []
    while rig.step():
        left.append((len(rig.out), rig.runtime.pending()))
    assert left == [(0, 3), (0, 3), (1, 0)]
    alone = forwarding(Logprobs(policy_model)).run(rollouts(0, ("abcdef", "ghijkl", "mnopqr")))
    for ours, theirs in zip(
        lists_of(pa.Table.from_batches(rig.out), "ref_logprobs"),
        lists_of(alone, "ref_logprobs"),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_small_groups_of_several_batches_share_a_micro_batch(policy_model: Model) -> None:
    rig = forwarding(Logprobs(policy_model))
    for group_id in range(4):
        rig.push(rollouts(group_id))
    assert rig.step() and not rig.step()
    assert ids(rig) == [[0, 1, 2, 3]]


def test_sources_are_not_mixed(policy_model: Model) -> None:
    rig = forwarding(Logprobs(policy_model))
    rig.push(rollouts(0))
    rig.push(rollouts(0, ("z",)), source="held_out")
    rig.push(rollouts(1))
    rig.run()
    assert ids(rig) == [[0, 1], [0]]


def test_a_batch_is_acknowledged_when_its_last_group_has_left(policy_model: Model) -> None:
    rig = forwarding(Logprobs(policy_model, micro_batch_tokens=10))
    rig.push(rollouts(0), rollouts(1))
    rig.push(rollouts(2))
    seen = []
    while rig.step():
        seen.append((ids(rig), list(rig.acks)))
    assert next(entry for entry in seen if entry[0]) == ([[0]], [])
    assert seen[-1] == ([[0], [1], [2]], [0, 2])


def test_there_is_always_room(policy_model: Model) -> None:
    plane = Versions()
    rig = forwarding(Logprobs(policy_model), plane=plane)
    rig.push(*(rollouts(n) for n in range(200)))
    assert rig.runtime.room() > 0


# Weights


def test_nothing_is_computed_before_the_first_version(policy_model: Model) -> None:
    plane = Versions()
    rig = forwarding(Logprobs(policy_model), plane=plane)
    rig.push(rollouts(0))
    assert not rig.step() and rig.runtime.pending() == 3
    plane.offer(0)
    assert rig.step() and rig.runtime.pending() == 0


def test_new_weights_are_adopted_between_two_rounds(policy_model: Model) -> None:
    plane = Versions()
    rig = forwarding(Logprobs(policy_model), plane=plane)
    for version, seed in ((0, 3), (1, 4)):
        plane.offer(version, weights(seed))
        rig.run(rollouts(version, ("b2",), version=version))
    for version, seed in ((0, 3), (1, 4)):
        (row,) = rig.out[version].to_pylist()
        np.testing.assert_allclose(
            row["ref_logprobs"], plain_logprobs(language_model(seed=seed), row), atol=1e-5
        )


def test_a_groups_numbers_come_from_one_version(policy_model: Model) -> None:
    plane = Versions()
    rig = forwarding(Logprobs(policy_model, micro_batch_tokens=5), plane=plane)
    plane.offer(0, weights(3))
    rig.push(rollouts(0, ("b2", "c3", "d4")))
    rig.step()
    plane.offer(1, weights(4))
    rig.run()
    for row in rig.out[0].to_pylist():
        np.testing.assert_allclose(
            row["ref_logprobs"], plain_logprobs(language_model(seed=3), row), atol=1e-5
        )
    assert plane.version == 1


def test_a_group_waits_for_the_critic_that_belongs_to_its_newest_token(critic: Model) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane)
    plane.offer(0)
    rig.push(rollouts(2, version=1), rollouts(3, version=0), rollouts(4, version=2))
    rig.run()
    assert ids(rig) == [[3]]
    plane.offer(1)
    rig.run()
    assert ids(rig) == [[3], [2]]
    plane.offer(2)
    rig.run()
    assert ids(rig) == [[3], [2], [4]]


def test_it_is_starved_while_groups_wait_for_weights_and_waits_where_there_are_none(
    critic: Model,
) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane)
    plane.offer(0)
    assert not rig.step() and not rig.runtime.starved()
    rig.push(rollouts(2, version=1))
    assert not rig.step() and rig.runtime.starved()
    plane.offer(1)
    assert rig.step() and not rig.runtime.starved()


def test_a_group_may_be_computed_as_much_older_as_the_feedback_allows(critic: Model) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane, max_staleness=1)
    plane.offer(0)
    rig.run(rollouts(2, version=1), rollouts(4, version=2))
    assert ids(rig) == [[2]]


def test_rows_of_an_unbounded_source_never_wait(critic: Model) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane)
    plane.offer(0)
    rig.push(rollouts(7, version=5), source="held_out")
    rig.run()
    assert ids(rig) == [[7]]


def test_a_wait_without_end_says_who_waits_for_what(critic: Model) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane)
    plane.offer(0)
    rig.push(rollouts(2, version=1))
    rig.run()
    rig.clock.now += Limits().slice_s + 1
    with pytest.raises(DeadlineError) as caught:
        rig.step()
    for part in (
        "'values' waited 1800 s for version 1 of 'critic'",
        "group 2 of 'prompts'",
        "version 1)",
        "has version 0",
    ):
        assert part in str(caught.value)


def test_the_wait_begins_anew_when_something_happens(critic: Model) -> None:
    plane = Versions()
    rig = forwarding(Values(critic), plane=plane)
    plane.offer(0)
    rig.push(rollouts(6, version=3))
    for version in (1, 2):
        rig.clock.now += Limits().slice_s - 1
        plane.offer(version)
        assert not rig.step()
    rig.clock.now += 2
    assert not rig.step()


# The rule


EQUAL = Bound(max_staleness=0, prompts_per_step=4)


def test_the_version_needed_follows_the_groups_that_each_trainer_consumes() -> None:
    twice = Bound(max_staleness=0, prompts_per_step=2)
    half = Bound(max_staleness=1, prompts_per_step=8)
    assert [needed(v, EQUAL, EQUAL) for v in (-1, 0, 1, 5)] == [0, 0, 1, 5]
    assert [needed(v, EQUAL, twice) for v in (0, 1, 2)] == [0, 2, 4]
    assert [needed(v, EQUAL, half) for v in (0, 1, 2, 4)] == [0, 0, 0, 1]


def test_no_version_is_needed_that_its_trainer_will_not_make() -> None:
    own = Bound(max_staleness=0, prompts_per_step=2, steps=5)
    assert [needed(v, EQUAL, own) for v in (1, 2, 3, 9)] == [2, 4, 5, 5]


@pytest.mark.parametrize("policy_step", [1, 3, 4])
@pytest.mark.parametrize("own_step", [1, 2, 4])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_two_trainers_that_drop_different_groups_never_deadlock(
    policy_step: int, own_step: int, staleness: int, ahead: int, seed: int
) -> None:
    """Groups are made under the policy's version, wait here, then go to both trainers, which may
    skip whole steps.
    """
    draw = np.random.default_rng(seed)
    source = Bound(max_staleness=ahead, prompts_per_step=policy_step)
    own = Bound(max_staleness=staleness, prompts_per_step=own_step)
    versions, dropped, taken = (
        {"policy": 0, "own": 0},
        {"policy": 0, "own": 0},
        {"policy": 0, "own": 0},
    )
    waiting: dict[int, int] = {}
    arrived: set[int] = set()
    issued = 0
    for _ in range(4000):
        while issued - dropped["policy"] < (versions["policy"] + ahead + 1) * policy_step:
            waiting[issued] = versions["policy"]
            issued += 1
        known = Known(version=versions["own"], told=versions["own"], dropped=dropped["own"])
        due = [n for n, version in waiting.items() if is_due(n, version, known, source, own)]
        for n in due:
            if known.version < needed(waiting[n], source, own):
                assert dropped["own"] > 0
        moved = bool(due)
        if due:
            n = int(draw.choice(due))
            del waiting[n]
            arrived.add(n)
        for who, size in (("policy", policy_step), ("own", own_step)):
            if all(n in arrived for n in range(taken[who], taken[who] + size)):
                taken[who] += size
                moved = True
                if draw.random() < 0.2:
                    dropped[who] += size
                else:
                    versions[who] += 1
        assert moved, (waiting, versions, dropped, taken)
        if versions["policy"] >= 30:
            return
    raise AssertionError("it goes on, but makes no steps")


def test_without_drops_the_way_out_of_a_deadlock_allows_nothing_more() -> None:
    for version in range(6):
        for newest in range(version + 1, 8):
            for group_id in range(newest * 4, newest * 4 + 12):
                assert not is_due(
                    group_id, newest, Known(version=version, told=version), EQUAL, EQUAL
                )


def test_weights_that_are_on_their_way_are_waited_for() -> None:
    """The trainer has spoken of version 1, so the group that only version 0 cannot do without is
    not the next.
    """
    assert not is_due(5, 1, Known(version=0, told=1, dropped=4), EQUAL, EQUAL)
    assert is_due(5, 1, Known(version=0, told=0, dropped=4), EQUAL, EQUAL)
