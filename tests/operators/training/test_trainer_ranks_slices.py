"""Ranks that read their own slices of a model have what one that loads the whole has, make the same
steps, and hold little more than their shares.
"""

import ctypes
import dataclasses
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks_rig import in_a_fork, led, train
from torch.distributed.tensor import DTensor
from trainer_rig import VOCABULARY, group, rows_of
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen3Config,
)

from dataflow.model import LoRA, Model
from operators.losses import value_loss
from operators.models.loading import load_adapted, load_model, map_large_blocks, outlined_to_train
from operators.trainer import Trainer
from operators.training.learner.build import make_learner
from operators.training.learner.learner import Learner
from operators.training.parallel.shard import BUFFER_BYTES
from transport.data import keep_freed_memory

SLOW = pytest.mark.slow


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
}


def written(folder: Path, family: str) -> Path:
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape) * 0.05)
    module.save_pretrained(folder, max_shard_size="6KB")
    return folder


def everything(learner: Learner, rank: int, ranks: int) -> dict[str, list[float]]:
    """Each tensor of the model, put together from those of all ranks."""
    tensors = {**dict(learner.module.named_parameters()), **dict(learner.module.named_buffers())}
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each)
        .detach()
        .flatten()
        .tolist()
        for name, each in tensors.items()
    }


def held(learner: Learner, rank: int, ranks: int) -> int:
    """Bytes of this rank's parts."""
    return sum(
        each.to_local().nbytes for each in learner.module.parameters() if isinstance(each, DTensor)
    )


@pytest.mark.parametrize(
    ("family", "head", "lora", "ranks", "tensor_parallel", "dp_replicate"),
    [
        pytest.param("llama", "lm", None, 3, 1, 1, marks=SLOW),
        ("tied qwen3", "lm", None, 2, 2, 1),
        pytest.param("llama", "value", None, 2, 1, 1, marks=SLOW),
        ("llama", "lm", LoRA(3), 2, 2, 1),
        pytest.param("mixtral", "lm", None, 2, 1, 1, marks=SLOW),
        pytest.param("mixtral", "lm", None, 2, 2, 1, marks=SLOW),
        pytest.param("tied qwen3", "lm", None, 4, 2, 1, marks=SLOW),
        pytest.param("llama", "lm", None, 4, 4, 1, marks=SLOW),
        pytest.param("llama", "lm", None, 4, 1, 2, marks=SLOW),
        pytest.param("tied qwen3", "lm", LoRA(3), 2, 1, 1, marks=SLOW),
    ],
    ids=str,
)
@in_a_fork
def test_ranks_read_what_one_loads_and_train_alike(
    tmp_path: Path,
    family: str,
    head: str,
    lora: LoRA | None,
    ranks: int,
    tensor_parallel: int,
    dp_replicate: int,
) -> None:
    torch.set_num_threads(1)
    model = Model(str(written(tmp_path, family)), head=head, lora=lora)
    loss = {"loss": value_loss} if head == "value" else {}
    trainer = Trainer(
        model, lr=1e-2, eps=1e-3, tensor_parallel=tensor_parallel, dp_replicate=dp_replicate, **loss
    )
    plain = load_model(model, dtype="float32") if lora is None else load_adapted(model)
    wanted = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    steps = [rows_of(*(group(4 * step + number) for number in range(4))) for step in range(2)]
    if head == "value":
        draw = np.random.default_rng(0)
        steps = [
            dataclasses.replace(
                rows, columns_S=rows.columns_S | {"values": draw.normal(size=len(rows.tokens.ids))}
            )
            for rows in steps
        ]
    expected = train(make_learner(trainer, model, node="trainer", device="cpu"), steps)

    def never() -> Learner:
        raise AssertionError("nobody loads the whole")

    with led(trainer, ranks, never, found=outlined_to_train(model)) as learner:
        for each in learner.everywhere(everything):
            assert each.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(
                    torch.tensor(each[name], dtype=tensor.dtype), tensor.detach().flatten()
                ), name
        size = sum(tensor.nbytes for tensor in plain.parameters())
        assert all(bytes_ < 0.75 * size for bytes_ in learner.everywhere(held))
        for outcome, of_one in zip(train(learner, steps), expected, strict=True):
            assert outcome.loss == pytest.approx(of_one.loss, rel=1e-5, abs=1e-6)
            assert outcome.grad_norm == pytest.approx(of_one.grad_norm, rel=1e-4)


RANKS = 2


MIB = 1 << 20


LARGE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=768,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    max_position_embeddings=64,
)


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "used",
            "free",
            "keepcost",
        )
    ]


def large(folder: Path) -> tuple[int, int]:
    """A policy; bytes of all of it, and of a layer. All that it took is given back."""
    map_large_blocks()
    module = LlamaForCausalLM(LARGE)
    module.save_pretrained(folder)
    layer = sum(weight.nbytes for weight in module.model.layers[0].parameters())
    return sum(weight.nbytes for weight in module.parameters()), layer


def watch(learner: Learner, rank: int, ranks: int) -> None:
    """From now on have each layer, when its gradients are there, write down what malloc has from
    the system.
    """
    most: list[int] = []
    learner.module.most = most
    for layer in learner.module.model.layers:
        layer.register_full_backward_hook(lambda *_: most.append(taken()))


def taken() -> int:
    """Bytes that malloc has from the system, used or free."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Info
    found = info()
    return int(found.arena + found.hblkhd)


def most(learner: Learner, rank: int, ranks: int) -> int:
    """What was written down, and what is taken now."""
    return max([taken(), *learner.module.most])


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="only glibc's malloc tells",
)
@in_a_fork
@pytest.mark.slow
def test_a_rank_holds_its_share_and_a_layer(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole, layer = large(tmp_path)
    keep_freed_memory()  # as every worker does
    model = Model(str(tmp_path))
    found = outlined_to_train(model)
    before = taken()

    def never() -> Learner:
        raise AssertionError("nobody loads the whole")

    with led(Trainer(model), RANKS, never, found=found) as learner:
        learner.everywhere(watch)
        train(
            learner,
            [rows_of(*(group(2 * step + number) for number in range(2))) for step in range(2)],
        )
        held = [each - before for each in learner.everywhere(most)]
    share = 4 * whole / RANKS  # weights, gradients, two moments
    least, bound = share + 2 * layer, share + 3 * layer + BUFFER_BYTES + 16 * MIB
    assert all(least < each < bound for each in held), [
        round(each / MIB) for each in (*held, least, bound)
    ]
