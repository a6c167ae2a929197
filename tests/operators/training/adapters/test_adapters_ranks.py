"""Adapters trained by several ranks together: the same as by one."""

from pathlib import Path

import pytest
import torch
from ranks_rig import in_a_fork, led, train, weights
from torch.distributed.tensor import DTensor
from trainer_rig import group, rows_of, tiny_llama

from dataflow.model import LoRA, Model
from operators.models.adapters import parts_cut
from operators.models.folders import ModelError
from operators.models.loading import load_adapted
from operators.trainer import Trainer
from operators.training.learner.build import forward_of, learner_of

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "dtype"),
    [
        pytest.param(2, 1, "float32", marks=SLOW),
        pytest.param(2, 1, "bfloat16", marks=SLOW),
        (2, 2, "float32"),
        pytest.param(2, 2, "bfloat16", marks=SLOW),
        pytest.param(4, 2, "float32", marks=SLOW),
        pytest.param(4, 4, "float32", marks=SLOW),
    ],
)
@in_a_fork
def test_ranks_train_the_adapters_that_one_does(
    tmp_path: Path, ranks: int, tensor_parallel: int, dtype: str
) -> None:
    torch.set_num_threads(1)
    tiny_llama().save_pretrained(tmp_path)
    model = Model(str(tmp_path), dtype=dtype, lora=LoRA(4))
    trainer = Trainer(model, lr=1e-2, eps=1e-3, max_grad_norm=0.1, tensor_parallel=tensor_parallel)

    def make():
        return learner_of(trainer, forward_of(trainer, load_adapted(trainer.model)), node="trainer")

    steps = [rows_of(*(group(4 * step + number) for number in range(4))) for step in range(3)]
    alone = make()
    wanted = train(alone, steps)
    with led(trainer, ranks, make) as learner:
        found = train(learner, steps)
        assert set(learner.parameters) == set(alone.parameters)
        loose = 1e-5 if dtype == "float32" else 2e-2
        for outcome, of_one in zip(found, wanted, strict=True):
            assert outcome.loss == pytest.approx(of_one.loss, rel=loose, abs=loose)
            assert outcome.grad_norm == pytest.approx(
                of_one.grad_norm, rel=loose if dtype == "float32" else 0.1
            )
        for rank_gradients in gradients(learner, steps[0]):
            for name, tensor in gradients(alone, steps[0])[0].items():
                torch.testing.assert_close(
                    rank_gradients[name], tensor, rtol=loose, atol=loose, msg=name
                )
        for each in weights(learner):
            for name, tensor in each.items():
                torch.testing.assert_close(
                    tensor,
                    alone.parameters[name],
                    rtol=0,
                    atol=1e-5 if dtype == "float32" else 2e-2,
                    msg=name,
                )


def gradients(learner, rows):
    """Of a step that is not made, as each rank puts them together from those of all."""
    for part in learner.begin(rows, 0):
        learner.micro(part)
    found = learner.everywhere(_gradients)
    learner.end(0.0)
    return [
        {name: torch.tensor(values) / learner.divisor for name, values in each.items()}
        for each in found
    ]


def _gradients(learner, rank, ranks):
    whole = {
        name: weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for name, weight in learner.parameters.items()
    }
    return {name: gradient.flatten().tolist() for name, gradient in whole.items()}


@pytest.mark.parametrize(
    ("style", "parts"),
    [
        ("colwise", ["q.base_layer", "q.lora_B.default"]),
        ("packed_colwise", ["q.base_layer", "q.lora_B.default"]),
        ("rowwise", ["q.base_layer", "q.lora_A.default"]),
    ],
)
def test_of_two_adapters_that_is_cut_which_has_the_dimension(style: str, parts: list[str]) -> None:
    assert parts_cut("q", style) == parts


@pytest.mark.parametrize("style", ["mla_kv_a_proj", "replicate"])
def test_an_adapted_layer_that_is_not_cut_by_rows_or_columns_is_refused(style: str) -> None:
    with pytest.raises(
        ModelError, match=f"'a.q' has adapters.*treats it as '{style}'.*leave it out of LoRA"
    ):
        parts_cut("a.q", style)
