"""What a trainer's rank among several holds: its share of the model, a layer, and what it exchanges of one."""

import ctypes
import platform
from pathlib import Path

import pytest
import torch
from ranks_rig import in_a_fork, led, train
from trainer_rig import VOCABULARY, group, rows_of
from transformers import LlamaConfig, LlamaForCausalLM

from dataflow.model import Model
from operators.models.heap import map_large_blocks
from operators.models.loading import outlined_to_train
from operators.trainer import Trainer
from operators.training.learner.learner import Learner
from operators.training.parallel.direct import BUFFER_BYTES
from transport.data import keep_freed_memory

RANKS, LAYERS = 2, 8
MIB = 1 << 20
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=768, intermediate_size=768, num_hidden_layers=LAYERS, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def written(folder: Path) -> tuple[int, int]:
    """A policy; bytes of all of it, and of a layer. All that it took is given back."""
    map_large_blocks()
    module = LlamaForCausalLM(CONFIG)
    module.save_pretrained(folder)
    layer = sum(weight.nbytes for weight in module.model.layers[0].parameters())
    return sum(weight.nbytes for weight in module.parameters()), layer


def watch(learner: Learner, rank: int, ranks: int) -> None:
    """From now on have each layer, when its gradients are there, write down what malloc has from the system."""
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
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc's malloc tells"
)
@in_a_fork
def test_a_rank_holds_its_share_and_a_layer(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole, layer = written(tmp_path)
    keep_freed_memory()  # as every worker does
    model = Model(str(tmp_path))
    found = outlined_to_train(model)
    before = taken()

    def never() -> Learner:
        raise AssertionError("nobody loads the whole")

    with led(Trainer(model), RANKS, never, found=found) as learner:
        learner.everywhere(watch)
        train(learner, [rows_of(*(group(2 * step + number) for number in range(2))) for step in range(2)])
        held = [each - before for each in learner.everywhere(most)]
    share = 4 * whole / RANKS  # weights, gradients, two moments
    least, bound = share + 2 * layer, share + 3 * layer + BUFFER_BYTES + 16 * MIB
    assert all(least < each < bound for each in held), [round(each / MIB) for each in (*held, least, bound)]
