"""The log-probabilities that a trainer computes stand beside its rollouts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from trainer_rig import (
    group,
    reference_logprobs,
    rig,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)

from operators.training.learner.learner import Learner
from operators.training.learner.together import Alone
from operators.training.retrain import other_logprobs
from operators.training.steps import NewLogprobs, rank_logprobs


class TwoAlike(Alone):
    tensor = 2


def trained(learner: Learner, *groups: pa.RecordBatch) -> NewLogprobs:
    for part in learner.begin(rows_of(*groups), 0):
        learner.micro(part)
    learner.end(0.1)
    found = NewLogprobs.of(learner)
    assert found is not None
    return found


def test_each_trained_token_has_the_log_probability_that_it_had_before_the_update() -> None:
    module = tiny_llama()
    learner = tiny_learner(
        tiny_trainer(micro_batch_tokens=40, skip_zero_advantage=False), tiny_llama()
    )
    groups = [group(number, size=4) for number in range(5)]
    rows = [row for records in groups for row in records.to_pylist()]
    wanted = [reference_logprobs(module, row["tokens"], row["mask"]).tolist() for row in rows]
    found = trained(learner, *groups)
    columns = [
        value
        for records in groups
        for value in found.beside([records]).column("new_logprobs").to_pylist()
    ]
    for row, values, expected in zip(rows, columns, wanted, strict=True):
        assert len(values) == len(row["tokens"])
        assert [value for value, chosen in zip(values, row["mask"], strict=True) if not chosen] == [
            0.0
        ] * (len(values) - len(expected))
        chosen = [value for value, chosen in zip(values, row["mask"], strict=True) if chosen]
        assert chosen == pytest.approx(expected, abs=1e-5)


def test_nothing_of_a_step_s_micro_batches_stays_on_the_device_once_it_has_ended() -> None:
    learner = tiny_learner(tiny_trainer(micro_batch_tokens=40, skip_zero_advantage=False))
    rows = rows_of(*(group(number, size=4) for number in range(5)))
    before = {name for name, value in vars(learner).items() if isinstance(value, list) and value}
    parts = learner.begin(rows, 0)
    for part in parts:
        learner.micro(part)
    during = {
        name for name, value in vars(learner).items() if isinstance(value, list) and value
    } - before
    assert len(parts) > 1 and during
    learner.end(0.1)
    assert not [name for name in during - {"parts"} if getattr(learner, name)]
    assert all(np.isfinite(part.new_S).any() for part in learner.parts)


def test_what_did_not_go_through_the_model_has_none() -> None:
    learner = tiny_learner(tiny_trainer(micro_batch_tokens=40))
    still, mixed = group(0, advantages=[0.0] * 3), group(1, advantages=[1.0, 0.0, -1.0])
    first = [
        {**row, "mask": [True] * len(row["mask"])}
        for row in group(2, advantages=[1.0, -1.0, 0.5]).to_pylist()
    ]
    whole = pa.RecordBatch.from_pylist(first, schema=mixed.schema)
    assert trained(learner, still).beside([still]).column("new_logprobs").null_count == 3, (
        "nothing was computed at all"
    )
    found = trained(learner, still, mixed, whole)
    assert found.beside([still]).column("new_logprobs").null_count == 3
    column = found.beside([mixed]).column("new_logprobs").to_pylist()
    assert [value is None for value in column] == [False, True, False]
    for values in found.beside([whole]).column("new_logprobs").to_pylist():
        assert values[0] is None and None not in values[1:], "nothing stands before the first token"
    (given,) = found.beside([mixed]).to_batches()
    assert found.beside([given]).to_batches() == [given], "a column that rows have stays"


def test_of_ranks_that_compute_the_same_one_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = tiny_learner(tiny_trainer())
    trained(learner, group(0, advantages=[1.0, -1.0, 0.5]))
    monkeypatch.setattr(learner, "together", TwoAlike())
    told = [rank_logprobs(learner=learner, rank=rank, ranks=4) for rank in range(4)]
    assert [len(plain["rollouts"]) // 8 for plain in told] == [3, 0, 3, 0]
    assert [len(plain["values"]) > 0 for plain in told] == [True, False, True, False]


def test_the_file_of_a_step_has_them_and_its_ratios_are_the_step_s(tmp_path: Path) -> None:
    world = rig(tmp_path, tiny_trainer(skip_zero_advantage=False))
    world.push(group(0), group(1))
    world.run()
    table = world.folder.files[1]
    new, old = (
        np.concatenate(table["new_logprobs" if new else "logprobs"].to_pylist())
        for new in (True, False)
    )
    ratios = np.exp(new - old)[np.concatenate(table["mask"].to_pylist())]
    assert world.folder.metrics[0]["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert world.folder.metrics[0]["ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)


def test_a_trainer_that_does_not_keep_them_writes_rows_as_they_came(tmp_path: Path) -> None:
    world = rig(tmp_path, tiny_trainer(keep_new_logprobs=False))
    world.push(group(0), group(1))
    world.run()
    assert world.folder.files[1].equals(pa.Table.from_batches([group(0), group(1)]))


def test_tokens_that_come_out_otherwise_are_counted() -> None:
    groups = [group(number, size=3, advantages=[1.0, -1.0, 0.5]) for number in range(2)]
    found = trained(tiny_learner(tiny_trainer()), *groups)
    kept = found.beside(groups).to_batches()
    assert other_logprobs(found, kept) == 0
    again = trained(tiny_learner(tiny_trainer(), tiny_llama(seed=1)), *groups)
    assert other_logprobs(again, kept) == sum(
        sum(row["mask"]) for records in groups for row in records.to_pylist()
    )
    assert other_logprobs(found, groups) is None and other_logprobs(None, kept) is None
