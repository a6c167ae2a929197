"""Ranks of a tiny trainer, as forks of the test: for tests of checkpoints."""

import math
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import distribute_tensor
from trainer_rig import Tokenizer, tiny_learner, tiny_llama, tiny_trainer
from transformers import AutoModelForCausalLM

from dataflow.system.forking import fork
from dataflow.weight_ends import Refresh
from operators.training.checkpoints import checkpoint
from operators.training.learner import memory
from operators.training.learner.build import state_tensors
from operators.training.learner.learner import Learner
from operators.training.parallel.mesh import make_mesh
from operators.training.parallel.shard import shard

REFRESHES = (Refresh(every=2), Refresh(every=1, decay=0.75))
"""Of readers whose weights are in the checkpoints too."""


def step(learner: Learner, number: int) -> None:
    """An optimiser step on gradients that are a function of its number, whoever holds which
    part.
    """
    for at, name in enumerate(sorted(learner.parameters)):
        weight: Any = learner.parameters[name]
        whole = torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(100 * number + at)
        )
        if hasattr(weight, "to_local"):
            whole = distribute_tensor(
                whole, weight.device_mesh, weight.placements, src_data_rank=None
            )
        weight.grad = whole
    learner.optimizer.step()


def keep(learner: Learner, refresh: Refresh, step: int, dtype: str = "bfloat16") -> None:
    """Have it keep what readers need that are refreshed so."""
    memory.add(
        learner=learner,
        rank=0,
        ranks=1,
        every=refresh.every,
        decay=refresh.decay,
        step=step,
        dtype=dtype,
    )


def whole(tensor: Any) -> torch.Tensor:
    """All of it; every rank calls."""
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


Mesh = tuple[int, int, int]
"""Replicas x shards x ranks that share out each layer."""


def be_rank(what: str, rank: int, mesh: Mesh, folder: Path) -> None:
    """One of so many. save: two steps of made-up gradients, then a checkpoint in the folder, as in
    "save bfloat16" in that type. go_on: load it, one step more; rank 0 writes what it loaded, and
    the weights then, to `loaded(folder, mesh)`.
    go_on_refreshed: with what is kept for readers that are refreshed.
    """
    torch.set_num_threads(1)
    ranks = math.prod(mesh)
    saves = what.startswith("save")
    module = tiny_llama() if saves else AutoModelForCausalLM.from_pretrained(folder).float().eval()
    learner = tiny_learner(tiny_trainer(), module)
    if ranks > 1:
        meet, cpu = folder.parent / f"meet-{what}-{mesh}", torch.device("cpu")
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
        replicas, _, tensor_parallel = mesh
        heads = module.config.num_key_value_heads
        made = make_mesh(
            cpu,
            ranks,
            tensor_parallel=tensor_parallel,
            dp_replicate=replicas,
            key_value_heads=heads,
        )
        shard(learner, made, None, cpu, "tiny")
    if saves:
        for refresh in REFRESHES:
            keep(learner, refresh, step=0)
        for number in range(2):
            step(learner, number)
            memory.follow(learner=learner, rank=rank, ranks=ranks, step=number + 1)
        checkpoint.save(
            folder,
            learner,
            Tokenizer(),
            {"step": 2},
            rank,
            ranks,
            dtype=what.partition(" ")[2] or None,
        )
    else:
        for refresh in REFRESHES if what == "go_on_refreshed" else ():
            keep(learner, refresh, step=2)
        checkpoint.restore(learner, rank, ranks, folder)
        found = {
            name: whole(tensor)
            for name, tensor in state_tensors(learner.optimizer, learner.parameters).items()
        }
        found |= {
            name: whole(tensor) for name, tensor in memory.tensors_of(learner.refreshed).items()
        }
        step(learner, 2)
        found |= {f"after/{name}": whole(weight) for name, weight in learner.parameters.items()}
        if rank == 0:
            save_file(found, loaded(folder, mesh))
    if ranks > 1:
        dist.barrier()


def loaded(folder: Path, mesh: Mesh) -> Path:
    """What ranks of such a mesh found in the folder."""
    return folder.parent / f"loaded-{'-'.join(map(str, mesh))}.safetensors"


def ranks_do(what: str, mesh: Mesh, folder: Path, deadline_s: float = 100.0) -> None:
    """Fork the ranks of a mesh and wait for them. AssertionError with what a rank said that
    failed.
    """
    children, ranks = {}, math.prod(mesh)
    for rank in range(ranks):
        pid = fork()
        if pid == 0:
            _run_and_end(what, rank, mesh, folder)
        children[rank] = pid
    deadline = time.monotonic() + deadline_s
    ended: dict[int, int] = {}
    while len(ended) < ranks and not any(ended.values()) and time.monotonic() < deadline:
        for rank, pid in children.items():
            if rank not in ended and os.waitpid(pid, os.WNOHANG)[0]:
                ended[rank] = int((folder.parent / f"error-{rank}").exists())
        time.sleep(0.01)
    for rank in children.keys() - ended.keys():
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    said = {path.name: path.read_text() for path in folder.parent.glob("error-*")}
    assert ended == dict.fromkeys(range(ranks), 0), (
        said or f"ranks {sorted(ended)} of {ranks} ended in time"
    )


def _run_and_end(what: str, rank: int, mesh: Mesh, folder: Path) -> None:
    try:
        be_rank(what, rank, mesh, folder)
    except BaseException:
        (folder.parent / f"error-{rank}").write_text(traceback.format_exc())
    os._exit(0)
