"""The two processes of the weight-plane bench: a trainer publishes, a reader takes, both in steps
of a millisecond.

trainer   Consumes: the reader's answers. Produces: versions, each with other bytes than the one
          before. Waits for: the reader to have taken a version, then for its digest. Unblocked by:
          the reader, or the deadline.
reader    Consumes: versions. Produces: when each was visible, its steps meanwhile, the digest of
          what it holds. Waits for: the trainer's next order. Unblocked by: the trainer, or the
          deadline.

An update is *busy* or not. Busy, both compute all the time and the system gets its turn between two
steps: that is what a run sees. Otherwise nobody computes and both ends wait: that is how fast the
path is by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from math import isqrt, prod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
import xxhash

from bench.weight_plane.cases import PATIENCE_S, Case, Job, Lap, Seat, Update, UpdateTimes
from transport.data import keep_freed_memory

if TYPE_CHECKING:
    from bench.weight_plane.ends import TrainerEnd

SIDE = 256
"""Rows and columns of the matrices that a step multiplies."""
STEP_S = 0.001
QUIET_STEPS = 20
"""The reader's steps before each busy update, with which those during the update are compared."""
WARM_LEAST, WARM_MOST, WARM_S = 2, 4, 3.0
"""Updates before the counted ones, as many as fit into that time: two, for there may be two buffers
to touch."""
END_S = 20.0
"""Longest time for closing what was opened; then it is killed."""
JOB_S = 150.0
"""Longest time for one job."""
FLOAT_ONE = 0x3F800000
"""1.0 in float32, as an integer."""


class Step:
    """About a millisecond of matrix products with the first of the weights, wherever they lie by
    now.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Measure how many products that is."""
        self._weight = next(iter(tensors.values()))
        self._side = min(SIDE, isqrt(self._weight.numel()))
        self._input, self._output = torch.rand(2, self._side, self._side).unbind()
        self._products = 1
        one_s = min(_ns(self) for _ in range(20)) / 1e9
        self._products = max(1, round(STEP_S / one_s))

    def __call__(self) -> None:
        """Compute."""
        matrix = self._weight.data.view(-1)[: self._side**2].view(self._side, self._side)
        for _ in range(self._products):
            torch.mm(self._input, matrix, out=self._output)


def measure(job: Job) -> UpdateTimes | str:
    """Run one job; what failed, in words, if it did. It leaves no process and no file behind."""
    shm = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="dataflow-bench-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(
            prefix="dataflow-bench-", dir=shm if shm.is_dir() else None, ignore_cleanup_errors=True
        ) as memory,
    ):
        return _run(job, Path(folder), Path(memory))


def train(job: Job, control: Connection, place: dict[str, Any]) -> UpdateTimes:
    """The trainer's part, until enough updates are counted. ValueError when the reader holds other
    bytes.
    """
    from bench.weight_plane.systems import open_trainer

    tensors = _filled(job.case)
    step, outcome = Step(tensors), UpdateTimes()
    with contextlib.closing(
        open_trainer(job.system, Seat(case=job.case, tensors=tensors, **place))
    ) as trainer:
        _expect(control, "ready", trainer.poll)
        began = counting = time.monotonic()
        for version in itertools.count(1):
            trainer.settle(PATIENCE_S)
            for tensor in tensors.values():
                tensor.view(torch.int32).add_(1)
            digest = _digest(tensors)
            warm = version <= (WARM_MOST if time.monotonic() - began < WARM_S else WARM_LEAST)
            busy = not warm and len(outcome.busy_s) <= len(outcome.waiting_s)
            update = _update(trainer, step if busy else None, version, control)
            if (answer := _receive(control, trainer.poll)) != digest:
                raise ValueError(
                    f"the reader holds other bytes than were published as version {version}:"
                    f" {answer}"
                )
            if warm:
                counting = time.monotonic()
            else:
                outcome.count(update, busy)
            enough = (
                len(outcome.waiting_s) == job.updates or time.monotonic() - counting > job.seconds
            )
            if enough and outcome.waiting_s and not busy:
                break
        control.send(None)
        _expect(control, "closed", trainer.poll)
    return outcome


def read(job: Job, control: Connection, place: dict[str, Any]) -> None:
    """The reader's part, until the trainer has enough."""
    from bench.weight_plane.systems import open_reader

    tensors = _zeros(job.case)
    step = Step(tensors)
    with contextlib.closing(
        open_reader(job.system, Seat(case=job.case, tensors=tensors, **place))
    ) as reader:
        control.send("ready")
        while (busy := _receive(control, reader.take)) is not None:
            laps: list[Lap] = []
            visible, began = 0, time.monotonic_ns()
            while not visible:
                if len(laps) == (QUIET_STEPS if busy else 0):
                    control.send("go")
                lap = time.monotonic_ns()
                version = reader.take() if busy else reader.wait(PATIENCE_S)
                turned = time.monotonic_ns()
                if version:
                    visible = turned
                if busy:
                    step()
                laps.append((lap, turned - lap, time.monotonic_ns() - lap))
                _in_time(began, "no version has come")
            control.send((visible, laps))
            control.send(_digest(tensors))
    control.send("closed")


def _run(job: Job, folder: Path, memory: Path) -> UpdateTimes | str:
    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.weight_plane.systems"])
    control, words = context.Pipe(), context.Pipe()
    roles = {"copier": _copy} if job.system == "memcpy" else {"trainer": train, "reader": read}
    children, results = [], {}
    patience_s = 0.0
    try:
        for side, (role, work) in enumerate(roles.items()):
            result, theirs = context.Pipe(duplex=False)
            place = {"words": words[side], "folder": folder, "memory": memory}
            child = context.Process(
                target=_child,
                args=(work, job, theirs, control[side], place),
                name=role,
                daemon=True,
            )
            child.start()
            children.append(child)
            theirs.close()
            results[result] = role
        for end in (*control, *words):
            end.close()
        outcome = _outcome(results)
        patience_s = END_S if isinstance(outcome, UpdateTimes) else 1.0
        return outcome
    finally:
        _end(children, patience_s)


def _outcome(results: dict[Connection, str]) -> UpdateTimes | str:
    """What the first child to say something says: the outcome, or what failed."""
    deadline = time.monotonic() + JOB_S
    while results and (remaining_s := deadline - time.monotonic()) > 0:
        for result in wait(list(results), timeout=remaining_s):
            assert isinstance(result, Connection)
            role = results.pop(result)
            try:
                outcome = result.recv()
            except EOFError:
                return f"the {role} ended without a word"
            if outcome is not None:
                return outcome if isinstance(outcome, UpdateTimes) else f"{role}: {outcome}"
    return f"no outcome after {JOB_S:g} s"


def _end(children: list[Any], patience_s: float) -> None:
    """Let the processes close what they opened; kill those that do not end, with what they have
    started.
    """
    deadline = time.monotonic() + patience_s
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join(END_S)


def _child(
    work: Callable[..., UpdateTimes | None], job: Job, result: Connection, *ends: Any
) -> None:
    """What each process does: work, and say what came of it. The one whose peer has gone leaves the
    word to it.
    """
    os.setsid()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        result.send(work(job, *ends))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        with contextlib.suppress(BrokenPipeError):
            result.send(None)
    except BaseException as error:
        result.send(f"{type(error).__name__}: {str(error)[:500]}")
        raise


def _update(trainer: TrainerEnd, step: Step | None, version: int, control: Connection) -> Update:
    """Publish one version and wait until the reader has taken it; with a step, compute all the
    time.
    """

    def turn() -> None:
        trainer.poll()
        if step:
            step()

    control.send(step is not None)
    _expect(control, "go", turn)
    called = time.monotonic_ns()
    trainer.publish(version)
    held_ns = time.monotonic_ns() - called
    while not control.poll(0.0 if step else 0.001):
        held_ns += _ns(trainer.poll)
        if step:
            step()
        _in_time(called, "the reader has not taken the version")
    visible, laps = _receive(control)
    return Update(called_ns=called, held_ns=held_ns, visible_ns=visible, laps=laps)


def _copy(job: Job, control: Connection, place: dict[str, Any]) -> UpdateTimes:
    """memcpy by one thread, tensor by tensor, with nobody else at work."""
    source, target = _filled(job.case), _zeros(job.case)
    pairs = [
        (target[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
        for name, tensor in source.items()
    ]
    outcome, begun = UpdateTimes(), time.monotonic()
    for number in itertools.count():
        before = time.monotonic_ns()
        for to, origin, nbytes in pairs:
            ctypes.memmove(to, origin, nbytes)
        if number:
            outcome.waiting_s.append((time.monotonic_ns() - before) / 1e9)
        if number and (number == 2 * job.updates or time.monotonic() - begun > job.seconds):
            break
    if _digest(source) != _digest(target):
        raise ValueError("memcpy has made other bytes")
    return outcome


def _filled(case: Case) -> dict[str, torch.Tensor]:
    """Weights whose every element has other bits than its neighbours; all are finite, as integers
    and as floats.
    """
    return {
        name: (
            torch.arange(
                FLOAT_ONE + number, FLOAT_ONE + number + prod(case.shape), dtype=torch.int32
            )
            .view(torch.float32)
            .view(case.shape)
        )
        for number, name in enumerate(case.names)
    }


def _zeros(case: Case) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.Parameter(torch.zeros(case.shape), requires_grad=False)
        for name in case.names
    }


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = xxhash.xxh3_128()
    for tensor in tensors.values():
        whole.update(tensor.detach().view(-1).numpy().data.cast("B"))
    return whole.hexdigest()


def _receive(control: Connection, meanwhile: Callable[[], object] = lambda: None) -> Any:
    """The peer's next message; the system goes on answering its own peer until then."""
    began = time.monotonic_ns()
    while not control.poll(0.002):
        meanwhile()
        _in_time(began, "the other process is silent")
    return control.recv()


def _expect(control: Connection, word: str, meanwhile: Callable[[], object]) -> None:
    answer = _receive(control, meanwhile)
    assert answer == word, f"expected {word!r}, found {answer!r}"


def _in_time(since_ns: int, what: str) -> None:
    if time.monotonic_ns() - since_ns > PATIENCE_S * 1e9:
        raise TimeoutError(f"{what} after {PATIENCE_S:g} s")


def _ns(call: Callable[[], object]) -> int:
    began = time.monotonic_ns()
    call()
    return time.monotonic_ns() - began
