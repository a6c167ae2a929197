"""Log-probabilities and values of rollouts: those of transformers' own forward, and of a trainer
with these weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rigs.forwards import (
    Clock,
    Forwarding,
    Versions,
    flat,
    forwarding,
    language_model,
    lists_of,
    plain_logprobs,
    rollouts,
    saved,
    tokenizer_of,
)
from rigs.heads import classifier
from rigs.operators import make_context
from rigs.policy import ALPHABET

from dataflow import Model
from dataflow.errors import OperatorError
from dataflow.model import LoRA
from dataflow.staleness import Bound
from operators import Logprobs, Trainer, Values
from operators.forward_pass.reading import disagreement
from operators.models.loading import load_model
from operators.training.learner import policy as policy_module
from operators.training.learner.build import make_learner
from operators.training.learner.rows import pack, step_rows

TEXTS = ("b2=c", "b2", "19 abc", "b2=c")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = saved(language_model(request.param), tmp_path_factory.mktemp("reference"))
    return Model(str(folder), name="reference").frozen()


@pytest.fixture(scope="module")
def groups() -> list[pa.RecordBatch]:
    return [
        rollouts(4, TEXTS),
        rollouts(5, ("7", "a b c d e f g h"), prompt="what is it "),
        rollouts(2, TEXTS[:1]),
    ]


def test_logprobs_are_those_of_the_plain_forward(
    reference: Model, groups: list[pa.RecordBatch]
) -> None:
    table = forwarding(Logprobs(reference)).run(*groups)
    module = load_model(reference)
    wanted = [plain_logprobs(module, row) for group in groups for row in group.to_pylist()]
    found = lists_of(table, "ref_logprobs")
    assert [len(row) for row in found] == [len(row) for row in wanted]
    np.testing.assert_allclose(flat(found), flat(wanted), atol=1e-5)
    assert table.column("ref_logprobs").type == pa.list_(pa.float32())


def test_a_rope_that_changes_with_length_is_that_of_the_longest_sequence(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.5, 3.0, 5.0, 9.0],
        "rope_theta": 1e4,
        "original_max_position_embeddings": 12,
    }
    module = language_model("Llama", rope_parameters=rope)
    group = rollouts(0, ("b2", "a b c d e f g h"))
    short, long = lists_of(
        forwarding(Logprobs(Model(str(saved(module, tmp_path)), context_tokens=64).frozen())).run(
            group
        ),
        "ref_logprobs",
    )
    for found, row in zip((short, long), group.to_pylist(), strict=True):
        beyond = {"tokens": row["tokens"] + [0] * 20, "mask": row["mask"] + [False] * 20}
        np.testing.assert_allclose(found, plain_logprobs(module, beyond)[: len(found)], atol=1e-5)
    assert abs(np.subtract(short, plain_logprobs(module, group.to_pylist()[0]))).max() > 0.1


def test_they_are_at_the_temperature_that_is_asked_for(
    reference: Model, groups: list[pa.RecordBatch]
) -> None:
    table = forwarding(Logprobs(reference, temperature=0.5)).run(*groups)
    module = load_model(reference)
    wanted = [plain_logprobs(module, row, 0.5) for group in groups for row in group.to_pylist()]
    np.testing.assert_allclose(flat(lists_of(table, "ref_logprobs")), flat(wanted), atol=1e-5)


def test_where_the_policy_drew_from_few_ids_the_distribution_is_over_these_alone(
    reference: Model,
) -> None:
    group = rollouts(0, ("b2",), masks={0: [5, 9], 2: [7]})
    (row,) = group.to_pylist()
    (found,) = lists_of(forwarding(Logprobs(reference)).run(group), "ref_logprobs")
    logits = load_model(reference)(input_ids=torch.tensor([row["tokens"]])).logits[0].detach()
    for at, (token, kept) in enumerate(zip(row["tokens"], row["sampling_mask"], strict=True)):
        if row["mask"][at]:
            left = logits[at - 1] if kept is None else logits[at - 1][kept]
            assert found[at] == pytest.approx(
                float(logits[at - 1, token] - left.logsumexp(-1)), abs=1e-5
            )
    assert sum(kept is not None for kept in row["sampling_mask"]) == 2


def test_in_an_episode_the_tokenizer_is_told_by_what_the_policy_said_first() -> None:
    (row,) = rollouts(0, ("b2=cx9",)).to_pylist()
    kinds = pa.schema([*rollouts(0).schema, pa.field("turn", pa.list_(pa.int32()))])
    said = {3, 4, 7, 8, 9}  # "b2", then "x9" and the end
    spoken = {
        **row,
        "mask": [at in said for at in range(10)],
        "turn": [int(at > 4) if at in said else -1 for at in range(10)],
    }
    heard = pa.RecordBatch.from_pylist([spoken], schema=kinds)
    assert disagreement(tokenizer_of(), heard) is None
    assert disagreement(tokenizer_of(ALPHABET[::-1]), heard) is not None


def test_a_rollout_of_several_training_rows_has_the_logprobs_of_each(reference: Model) -> None:
    """The second row has another beginning; where no row is longer than the model takes, their sum
    may be.
    """
    (row,) = rollouts(0, ("b2=c",)).to_pylist()
    other = [row["tokens"][2], *row["tokens"]]
    mask = [False, *row["mask"]]
    both = {
        **row,
        "tokens": row["tokens"] + other,
        "mask": row["mask"] + mask,
        "logprobs": [0.0] * (2 * len(mask) - 1),
        "versions": [0] * (2 * len(mask) - 1),
        "training_row": [0] * len(row["mask"]) + [1] * len(mask),
    }
    kinds = pa.schema([*rollouts(0).schema, pa.field("training_row", pa.list_(pa.int32()))])
    group = pa.RecordBatch.from_pylist(
        [both, {**both, "position": 1, "rollout_id": 1}], schema=kinds
    )
    module = load_model(reference)
    wanted = plain_logprobs(module, row) + plain_logprobs(module, {"tokens": other, "mask": mask})
    made = forwarding(Logprobs(reference))
    made.runtime._reading._most = len(other)  # type: ignore[attr-defined]
    found = made.run(group)
    assert lists_of(found, "error") == [None, None]
    np.testing.assert_allclose(lists_of(found, "ref_logprobs"), [wanted, wanted], atol=1e-5)


@pytest.mark.parametrize("most_logits", [policy_module.MOST_LOGITS, 0], ids=["whole", "sliced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_equal_weights_they_are_the_trainers_bit_for_bit(
    dtype: str,
    most_logits: int,
    tmp_path: Path,
    groups: list[pa.RecordBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer keeps float32 weights and computes in the model's type; the operator has the
    weights in that type.
    """
    monkeypatch.setattr(policy_module, "MOST_LOGITS", most_logits)
    module = language_model("Llama").to(getattr(torch, dtype))
    model = Model(str(saved(module, tmp_path)), dtype=dtype)
    table = forwarding(Logprobs(model, name="proximal_logprobs")).run(*groups)
    rows = step_rows(groups, ("logprobs",))
    learner = make_learner(Trainer(model), model, node="trainer", device="cpu")
    learner.open(0)
    with learner.computing():
        tree = pack(rows.tokens.ids, rows.tokens.mask, rows.offsets)
        new = learner.forward.computed(tree, None, ())["new_logprobs"]
    found = flat(lists_of(table, "proximal_logprobs"))
    assert np.array_equal(found[rows.chosen_S], new.detach().numpy().astype(np.float64))
    assert not found[~rows.chosen_S].any()


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_values_are_those_of_the_plain_forward(
    family: str, tmp_path: Path, groups: list[pa.RecordBatch]
) -> None:
    critic = Model(
        str(saved(classifier(family, "TokenClassification"), tmp_path)), head="value"
    ).frozen()
    table = forwarding(Values(critic)).run(*groups)
    module = load_model(critic)
    for row in table.to_pylist():
        numbers = module(input_ids=torch.tensor([row["tokens"]])).logits[0, :, 0].tolist()
        wanted = [numbers[at - 1] if chosen else 0.0 for at, chosen in enumerate(row["mask"])]
        np.testing.assert_allclose(row["values"], wanted, atol=1e-5)


def test_a_policy_with_adapters_is_read_with_the_newest_of_them(
    reference: Model, groups: list[pa.RecordBatch]
) -> None:
    model, plane = Model(reference.source, lora=LoRA(4, targets=("q_proj", "up_proj"))), Versions()
    context = make_context(
        node="proximal_logprobs", reader=plane, feedback=Bound(max_staleness=0, prompts_per_step=1)
    )
    operator = Logprobs(model, name="proximal_logprobs")
    rig = Forwarding(operator.build(context), Clock())
    torch.manual_seed(0)
    plane.offer(0, {name: torch.randn_like(tensor) / 4 for name, tensor in plane.tensors.items()})
    table = rig.run(*groups)
    merged = load_model(reference)
    for path, layer in merged.named_modules():
        a, b = (plane.tensors.get(f"{path}.lora_{side}.default.weight") for side in "AB")
        if a is not None and b is not None:
            layer.weight.data += model.lora.alpha / model.lora.rank * b @ a
    wanted = [plain_logprobs(merged, row) for group in groups for row in group.to_pylist()]
    np.testing.assert_allclose(flat(lists_of(table, "proximal_logprobs")), flat(wanted), atol=1e-4)
    before = [plain_logprobs(load_model(reference), row) for row in groups[0].to_pylist()]
    assert np.abs(flat(before) - flat(wanted[: len(before)])).max() > 0.01


def test_a_critic_that_begins_as_a_policy_values_everything_at_0(reference: Model) -> None:
    critic = Model(reference.source, head="value", name="critic").frozen()
    (found,) = lists_of(forwarding(Values(critic)).run(rollouts(0, ("b2",))), "values")
    assert found == [0.0] * len(found)


def test_a_rollout_longer_than_the_model_takes_fails_and_its_siblings_do_not(
    tmp_path: Path,
) -> None:
    model = Model(
        str(saved(language_model("Llama", max_position_embeddings=8), tmp_path)), name="short"
    ).frozen()
    table = forwarding(Logprobs(model)).run(rollouts(0, ("b2", "abcdefgh")))
    assert table.column("error").to_pylist() == [
        None,
        "ref_logprobs: the rollout has 12 tokens, but 'short' takes 8; lower max_tokens",
    ]
    assert [row is None for row in lists_of(table, "ref_logprobs")] == [False, True]


def test_a_rollout_with_a_token_that_the_model_lacks_fails_and_its_siblings_do_not(
    tmp_path: Path,
) -> None:
    model = Model(
        str(saved(language_model("Llama", vocab_size=42), tmp_path)), name="small"
    ).frozen()
    alone = forwarding(Logprobs(model)).run(rollouts(0, ("aa",)))
    table = forwarding(Logprobs(model)).run(rollouts(0, ("a-", "aa")))
    error = (
        "ref_logprobs: the rollout has token 42, but 'small' knows 42; give a model with the"
        " policy's tokenizer"
    )
    assert table.column("error").to_pylist() == [error, None]
    assert lists_of(table, "ref_logprobs") == [None, *lists_of(alone, "ref_logprobs")]


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    backwards = tokenizer_of("".join(reversed("abcdefghijklmnopqrstuvwxyz0123456789= .-")))
    teacher = Model(
        str(saved(language_model("Llama"), tmp_path, backwards)), name="teacher"
    ).frozen()
    with pytest.raises(
        OperatorError,
        match=r"'teacher', whose tokenizer is another: the policy wrote 'b2', which it",
    ):
        forwarding(Logprobs(teacher, name="teacher_logprobs")).run(rollouts(0, ("b2",)))


def test_a_number_that_is_none_is_an_error_of_its_row(reference: Model) -> None:
    module: Any = load_model(reference)
    module.get_input_embeddings().weight.data[tokenizer_of()("q")["input_ids"][0]] = float("nan")
    rig = forwarding(Logprobs(reference), module=module)
    table = rig.run(rollouts(0, ("b2", "aq")))
    assert table.column("error").to_pylist() == [
        None,
        "ref_logprobs: the number that the model gave is not finite",
    ]
    assert [row is None for row in lists_of(table, "ref_logprobs")] == [False, True]


def test_what_a_trainer_reads_can_be_read_off_the_declarations() -> None:
    actor, critic = Model("actor"), Model("critic", head="value")
    assert (
        Logprobs(actor).provides({})["ref_logprobs"]
        == Values(critic).provides({})["values"]
        == pa.list_(pa.float32())
    )
    assert Trainer(critic, loss=lambda new_values, values, advantage: new_values).faults() == []
