"""Ranks of an FSDP2 trainer and of tensor-parallel generators, forked by a process that has
imported what they need.

The process takes one Case per line of its input, runs it to the end and answers with a line of exit
statuses, by the names of the ranks' results. What each rank saw, and its log, is left in the case's
folder.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch._dynamo  # what every optimizer imports when it is made
import torch.distributed as dist
import xxhash
from fsdp_case import CASE_S, EXCHANGE_S, Case, case_of
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from dataflow.system.child import die_with_parent
from operators.engine.parallel import lockstep
from operators.engine.parallel.shards import TensorSlice, distribute
from transport.weights.layout.from_torch import layout_of
from transport.weights.layout.layout import Mesh
from transport.weights.layout.parallel_plan import mesh_layout
from transport.weights.protocol.membership import Deadlines
from transport.weights.sharded.reader import ShardedReader
from transport.weights.sharded.writer import ShardedWriter

PACE = Deadlines(
    heartbeat_s=0.1, gone_s=EXCHANGE_S, form_s=EXCHANGE_S, ready_s=EXCHANGE_S, transfer_s=EXCHANGE_S
)
CPU = torch.device("cpu")
VOCABULARY = 50
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def llama(case: Case, seed: int) -> LlamaForCausalLM:
    """A small Llama: its vocabulary, MLP and usually its hidden size leave uneven tails."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=3 * case.heads,
            intermediate_size=46,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            head_dim=4,
            attention_bias=True,
            tie_word_embeddings=case.tied,
        )
    )


def train(case: Case, rank: int) -> None:
    """A trainer's rank: it steps on random tokens all the time, and never waits for a generator.

    Only where versions are sent from its own tensors does it settle before a step, and stay with
    the last.
    """
    lockstep.join(case.meeting("trainer", 0), rank, case.trainer, CPU, EXCHANGE_S)
    model = llama(case, seed=0)
    mesh = init_device_mesh("cpu", (case.trainer,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    layout = layout_of(model, range(case.trainer))
    if case.cast == "trainer":
        layout = layout.cast(case.dtype)
    zero_copy = case.hold == "until_settle"
    writer = ShardedWriter(
        layout, rank, case.address, ranks=case.trainer, hold=case.hold, deadlines=PACE
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    version = steps = 0
    faults: dict[str, str] = {}
    while True:
        tokens = torch.randint(VOCABULARY, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        writer.poll()
        assert writer.settle(EXCHANGE_S)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        found = dict(writer.faults)
        ready, over = _told(_taken(case, writer, version), _ended(case))
        if over:
            break
        faults = found
        if version < case.last and (ready or version >= case.in_turn):
            version += 1
            full = {
                name: parameter.full_tensor().detach()
                for name, parameter in model.named_parameters()
            }
            if rank == 0:
                save_file(full, case.oracle(version))
            writer.publish(
                version,
                {name: parameter.to_local() for name, parameter in model.named_parameters()},
            )
            while zero_copy and version == case.last and not _told(_ended(case))[0]:
                time.sleep(0.005)
    writer.close()
    lockstep.leave()
    _write(case.result("trainer", 0, rank), steps=steps, faults=faults)


@torch.no_grad()
def generate(case: Case, number: int, rank: int) -> None:
    """A generator's rank: it computes all the time, with what all ranks of its group have agreed to
    adopt.
    """
    size, dtype = case.groups[number], getattr(torch, case.dtype)
    model = llama(case, seed=1 + rank).to(dtype)
    tensors = {
        name: (tuple(parameter.shape), case.dtype) for name, parameter in model.named_parameters()
    }
    aliases = {HEAD: EMBEDDING} if case.tied else {}
    layout = mesh_layout(tensors, model.tp_plan, Mesh.of(1, 1, size), aliases)
    mesh = lockstep.join(case.meeting("generator", number), rank, size, CPU, EXCHANGE_S)
    pieces = {name: TensorSlice(None) for name in tensors}
    if size > 1:
        pieces = {
            name: shard.piece for name, shard in distribute(model, mesh, CPU, "llama").items()
        }
    reader = ShardedReader(
        layout, rank, case.address, f"generator-{number}", ranks=size, deadlines=PACE
    )
    reader.attach(_tensors(model))
    tokens = torch.arange(12).view(1, 12)
    adopted: list[int] = []
    steps: list[tuple[int, str]] = []
    full: dict[str, torch.Tensor] = {}
    while reader.version < case.last:
        rests = (
            case.rests and reader.version == case.in_turn and not case.oracle(case.last).exists()
        )
        offer = reader.poll() if rank == 0 and not rests else None
        held = _adopted_together(reader, offer.version if offer else -1)
        time.sleep(0.005)
        if held < 0:
            continue
        if held not in adopted[-1:]:
            adopted.append(held)
            full = load_file(case.oracle(held))
        prove(_tensors(model), pieces, full, dtype)
        logits = model(input_ids=tokens).logits
        prove(_tensors(model), pieces, full, dtype)
        steps.append(
            (
                reader.version,
                xxhash.xxh3_64_hexdigest(logits.contiguous().view(torch.uint8).numpy().data),
            )
        )
    _write(case.result("generator", number, rank), adopted=adopted, steps=steps)
    while not _ended(case):
        time.sleep(0.005)
    reader.close()
    lockstep.leave()


def prove(
    mine: Mapping[str, torch.Tensor],
    pieces: Mapping[str, TensorSlice],
    full: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """AssertionError unless the rank's bytes are those of gather-then-shard, as transformers' own
    rule shards.
    """
    assert mine.keys() == pieces.keys() == full.keys()
    for name, piece in pieces.items():
        wanted, found = piece.of(full[name].to(dtype)), mine[name]
        assert (wanted.shape, wanted.dtype) == (found.shape, found.dtype), (
            name,
            wanted.shape,
            found.shape,
        )
        assert torch.equal(_bytes(wanted), _bytes(found)), f"other bytes in {name}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a rank holds and computes with: parameters of its own, and inside of the DTensors at the
    model's ends.
    """
    return {
        name: parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }


def _adopted_together(reader: ShardedReader, offered: int) -> int:
    """Adopt what rank 0 was offered, if anything; the version that every rank holds now.

    A rank that lost its place in the group meanwhile may get a newer one; then all go on to
    that.
    """
    goal = _largest(offered)
    while goal >= 0:
        held = reader.wait(goal, EXCHANGE_S)
        goal, least = _largest(held), -_largest(-held)
        if least == goal:
            break
    return reader.version


def _largest(value: int) -> int:
    """Of all ranks of this side."""
    agreed = torch.tensor([value])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return int(agreed)


def _told(*flags: bool) -> list[bool]:
    """What rank 0 says."""
    said = torch.tensor(flags, dtype=torch.int64)
    dist.broadcast(said, src=0)
    return [bool(flag) for flag in said.tolist()]


def _taken(case: Case, writer: ShardedWriter, version: int) -> bool:
    """Whether every generator has joined and holds this version, none when it is 0; rank 0
    knows.
    """
    held = [status.version for status in writer.readers if status.state in ("joined", "committed")]
    return held == [version or -1] * len(case.groups)


def _ended(case: Case) -> bool:
    """Whether every generator has what it came for."""
    return all(case.result(*each).exists() for each in case.ranks() if each[0] == "generator")


def _write(path: Path, **seen: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(seen))
    part.rename(path)


def main() -> None:
    """Run one case after another until the input ends."""
    die_with_parent()
    for line in sys.stdin:
        print(json.dumps(run(case_of(line))), flush=True)


def run(case: Case) -> dict[str, int]:
    """Exit statuses of all ranks; the first that fails, or the deadline, ends the others by
    SIGKILL.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a process of {threads} threads cannot be forked safely"
    alive: dict[int, str] = {}
    for side, number, rank in case.ranks():
        case.meeting(side, number).mkdir(parents=True, exist_ok=True)
        body = (
            (lambda n=number, r=rank: generate(case, n, r))
            if side == "generator"
            else lambda r=rank: train(case, r)
        )
        alive[_fork(body, case.log(side, number, rank))] = case.result(side, number, rank).stem
    statuses: dict[str, int] = {}
    deadline = time.monotonic() + CASE_S
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < deadline and not any(statuses.values()):
            time.sleep(0.01)
        else:
            for left in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.01)
    return statuses


def _fork(body: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        end = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(end, 1)
        os.dup2(end, 2)
        torch.set_num_threads(1)
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
