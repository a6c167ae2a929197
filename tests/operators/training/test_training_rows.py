"""How a rollout was cut into training rows changes neither its weight in the loss nor its group's
baseline.
"""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from trainer_rig import (
    COLUMNS,
    gradient,
    group,
    reference_logprobs,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)

from dataflow.records import TRAINING_ROW, schema
from dataflow.tokens.rollout_tokens import cuts, unfolded
from operators.credit import (
    advantage,
    leave_one_out,
    normalized_advantage,
    reward_to_go,
    turn_rewards,
)
from operators.losses import aipo, gspo, sft
from operators.training.learner.learner import Prepared
from operators.training.learner.rows import pack, step_rows
from operators.training.parallel.lead import CODEC, chosen, dealt

ROW_COLUMNS = {**COLUMNS, TRAINING_ROW: pa.list_(pa.int32())}


PER_TOKEN = {"tokens": None, "mask": False, "logprobs": 0.0, "versions": -1}


"""Of tokens that are context; of `tokens` as they were."""


def cut(batch: pa.RecordBatch, seed: int, most: int = 3) -> pa.RecordBatch:
    """The same rollouts, each cut in up to so many rows: what was said before stands again, as
    context.
    """
    draw, rows = np.random.default_rng(seed), []
    for row in batch.to_pylist():
        begin, size = row["mask"].index(True), len(row["tokens"])
        inside = np.arange(begin + 1, size)
        places = sorted(
            draw.choice(
                inside, min(int(draw.integers(0, most)), len(inside)), replace=False
            ).tolist()
        )
        made = {name: [] for name in (*PER_TOKEN, TRAINING_ROW)}
        for number, (first, last) in enumerate(zip([0, *places], [*places, size], strict=True)):
            for name, context in PER_TOKEN.items():
                before = row[name][:first]
                made[name] += (before if context is None else [context] * len(before)) + row[name][
                    first:last
                ]
            made[TRAINING_ROW] += [number] * last
        rows.append({**row, **made})
    return pa.RecordBatch.from_pylist(rows, schema=schema(ROW_COLUMNS))


def groups(count: int = 3) -> list[pa.RecordBatch]:
    return [group(number, size=4, completion=9) for number in range(count)]


def reference(batches: list[pa.RecordBatch], normalize: str) -> tuple[float, torch.Tensor]:
    """Loss and gradient of aipo in float64, each rollout in one piece, by the model's own
    attention.
    """
    module = tiny_llama(dtype=torch.float64)
    rows = [row for batch in batches for row in batch.to_pylist()]
    counts = [sum(row["mask"]) for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for row, count in zip(rows, counts, strict=True):
        new = reference_logprobs(module, row["tokens"], row["mask"])
        old = torch.tensor(
            [p for p, is_chosen in zip(row["logprobs"], row["mask"], strict=True) if is_chosen]
        )
        weight = (new.detach() - old).exp().clamp(max=4.0)
        share = {"tokens": sum(counts), "rollouts": len(rows), "rollout_means": len(rows) * count}[
            normalize
        ]
        total = total - (weight * row["advantage"] * new).sum() / share
    total.backward()
    return float(total.detach()), torch.cat(
        [weight.grad.flatten() for weight in module.parameters()]
    )


@pytest.mark.parametrize("normalize", ["tokens", "rollouts", "rollout_means"])
@pytest.mark.parametrize("limit", [1, 60, 100_000], ids=["a rollout each", "some", "all"])
def test_a_rollout_in_several_rows_weighs_what_it_weighs_in_one(normalize: str, limit: int) -> None:
    trainer = tiny_trainer(
        normalize=normalize, micro_batch_tokens=limit, loss=functools.partial(aipo, rho=4.0)
    )
    whole = groups()
    wanted = reference(whole, normalize)
    for seed in range(4):
        rows = rows_of(*[cut(batch, seed) for batch in whole])
        assert rows.cuts_S.any() and rows.trained_R.tolist() == rows_of(*whole).trained_R.tolist()
        loss, found, _ = gradient(tiny_learner(trainer, tiny_llama(dtype=torch.float64)), rows)
        assert loss == pytest.approx(wanted[0], rel=1e-6)
        torch.testing.assert_close(found, wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", [aipo, gspo, sft])
def test_rows_share_their_prefixes_and_a_loss_of_whole_rollouts_sees_whole_rollouts(
    loss: object,
) -> None:
    ends = []
    for batches in (groups(), [cut(batch, 1) for batch in groups()]):
        rows = rows_of(*batches)
        learner = tiny_learner(
            tiny_trainer(loss=loss, normalize="rollout_means"), tiny_llama(dtype=torch.float64)
        )
        for part in learner.begin(rows, 0):
            learner.micro(part)
        outcome = learner.end(0.0)
        ends.append((outcome.nodes, outcome.loss, outcome.grad_norm, outcome.measures))
    assert ends[0][0] == ends[1][0], "as many tokens go through the model"
    assert ends[1][1:3] == pytest.approx(ends[0][1:3], rel=1e-9)
    known = {name: value for name, value in ends[0][3].items() if value is not None}
    assert known == pytest.approx({name: ends[1][3][name] for name in known}, rel=1e-6)


@pytest.mark.parametrize("credit", [advantage, normalized_advantage, leave_one_out])
def test_a_group_has_one_value_per_rollout_however_its_rollouts_were_cut(credit: object) -> None:
    for batch in groups():
        made = cut(batch, 2)
        values = [each.column("reward").to_numpy() for each in (batch, made)]
        assert credit.function(values[0]).tobytes() == credit.function(values[1]).tobytes()  # type: ignore[attr-defined]


def test_credit_by_token_runs_on_over_the_rows() -> None:
    """What a later row earns counts for what was said in an earlier one, and what stands as context
    is passed over.
    """
    (whole,) = groups(1)
    made = cut(whole, 3)
    for one, other in zip(whole.to_pylist(), made.to_pylist(), strict=True):
        found = []
        for row in (one, other):
            mask = np.array(row["mask"])
            rewards = turn_rewards.function(1.0, np.where(mask, 0.25, 0.0), mask)
            found.append(reward_to_go.function(rewards, mask, gamma=0.9)[mask])
        assert found[0].tobytes() == found[1].tobytes()


def test_no_row_predicts_its_first_token_and_lists_of_another_length_are_refused() -> None:
    batch = cut(group(0, size=2, completion=9), 1)
    at = batch.schema.get_field_index("mask")
    all_true = pa.array([[True] * len(row) for row in batch.column(at).to_pylist()])
    rows = rows_of(batch.set_column(at, batch.schema.field(at), all_true))
    positions, begins, owners = rows.sequences(np.arange(rows.rollouts))
    assert not rows.chosen_S[begins[:-1]].any() and len(owners) > rows.rollouts
    packed = pack(rows.tokens.ids[positions], rows.tokens.mask[positions], begins)
    assert packed.flat_T.tolist() == np.flatnonzero(rows.chosen_S).tolist()
    assert rows.longest_R.tolist() == [
        int(np.diff(begins)[owners == at].max()) for at in range(rows.rollouts)
    ]
    at = batch.schema.get_field_index(TRAINING_ROW)
    short = batch.set_column(
        at, TRAINING_ROW, pa.array([[0]] * batch.num_rows, pa.list_(pa.int32()))
    )
    with pytest.raises(
        ValueError, match="column 'training_row' of rollout 0 has 1 numbers but the rollout has"
    ):
        step_rows([short], ("advantage",))


LENGTHS = st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=6)


@examples(200)
@given(LENGTHS)
def test_rows_unfold_to_what_was_put_end_to_end(rollouts: list[list[int]]) -> None:
    numbers = [np.repeat(np.arange(len(rows)), rows) for rows in rollouts]
    offsets = np.r_[0, np.cumsum([len(each) for each in numbers])].astype(np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *numbers])
    begins, owners = unfolded(offsets, cuts(flat, offsets))
    wanted = [(owner, length) for owner, rows in enumerate(rollouts) for length in rows or [0]]
    assert list(zip(owners.tolist(), np.diff(begins).tolist(), strict=True)) == wanted


def test_rollouts_are_dealt_out_to_ranks_with_their_rows() -> None:
    rows = rows_of(*[cut(batch, 5) for batch in groups()])
    step = Prepared(rows=rows, computed=np.arange(1, rows.rollouts))
    for share in dealt(step, 2, 40, whole=False):
        travelled = CODEC.decode(CODEC.encode(share)).rows
        assert np.array_equal(travelled.cuts_S, share.rows.cuts_S)
        for at, rollout in enumerate(share.rows.rollout_ids_R.tolist()):
            (there,) = np.flatnonzero(rows.rollout_ids_R == rollout)
            one, other = chosen(share.rows, np.array([at])), chosen(rows, np.array([there]))
            assert np.array_equal(one.cuts_S, other.cuts_S) and np.array_equal(
                one.tokens.ids, other.tokens.ids
            )
