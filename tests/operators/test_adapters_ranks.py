"""Adapters trained by several ranks together: the same as by one."""

from pathlib import Path

import pytest
import torch
from ranks_rig import in_a_fork, led, train, weights
from trainer_rig import group, rows_of, tiny_llama

from dataflow.model import LoRA, Model
from operators.adapters import load_adapted
from operators.trainer import Trainer
from operators.training.build import forward_of, learner_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_a_fork
def test_two_ranks_train_the_adapters_that_one_does(tmp_path: Path, dtype: str) -> None:
    torch.set_num_threads(1)
    tiny_llama().save_pretrained(tmp_path)
    trainer = Trainer(Model(str(tmp_path), dtype=dtype, lora=LoRA(4)), lr=1e-2)

    def make():
        return learner_of(trainer, forward_of(trainer, load_adapted(trainer.model)), node="trainer")

    steps = [rows_of(*(group(4 * step + number) for number in range(4))) for step in range(2)]
    alone = make()
    wanted = train(alone, steps)
    with led(trainer, 2, make) as learner:
        found = train(learner, steps)
        assert set(learner.parameters) == set(alone.parameters)
        loose = 1e-5 if dtype == "float32" else 2e-2
        assert [o.loss for o in found] == pytest.approx([o.loss for o in wanted], rel=loose, abs=loose)
        for each in weights(learner):
            for name, tensor in each.items():
                torch.testing.assert_close(
                    tensor, alone.parameters[name], rtol=0, atol=1e-4 if dtype == "float32" else 2e-2
                )
