"""A trainer's checkpoints: files made beside their place and moved there whole, what one holds,
and how a trainer begins from one.

Every rank writes what it holds, in the background, straight from its memory: the weights into files
that all ranks share, its optimiser's state into one of its own. Nobody gathers a tensor or keeps a
copy; so the next update waits until all is read (`Learner.unread`). What lies on a GPU is copied to
main memory first, and no update waits for the disk. Rank 0 adds the config, and is done when the
shards of all ranks stand beside it. No pickle anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataflow.errors import DeadlineError, RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.ledger import MadeStep, some
from dataflow.folder.retention import KNOB, gone
from dataflow.limits import Limits
from dataflow.model import ADAPTER_CONFIG, Model
from dataflow.runtime import Context
from dataflow.system.clocks import Countdown
from dataflow.system.files import disk
from operators.models import adapters
from operators.models.loading import no_progress_bar
from operators.models.slices import saved_as
from operators.training.checkpoints import shards
from operators.training.checkpoints.shards import ModelFiles
from operators.training.learner.build import fresh_state, state_tensors
from operators.training.learner.memory import tensors_of

if TYPE_CHECKING:
    from operators.training.learner.learner import Learner


@dataclass
class StagingBuffers:
    """Copies of tensors in main memory, in buffers that stay: fresh memory takes several times as
    long to fill.
    """

    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _devices: set[torch.device] = field(default_factory=set)

    def copied(self, name: str) -> Callable[[Tensor], Tensor]:
        """What brings a tensor of that name to main memory: one that is there is itself."""
        return lambda tensor: self.copy(name, tensor) if tensor.is_cuda else tensor

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor, once `settle` was called; it stands until the next copy under that
        name.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        """Wait for copies from accelerators."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


class Background:
    """One piece of work at a time, in a thread.

    consumes: a function by `start`
    produces: its effects; its error, raised once, by the next `wait` or `start`
    waits for: in `wait` and `start`, the work under way, with a deadline
    unblocked by: its end
    """

    def __init__(self, activity: str) -> None:
        """activity: what is under way, for errors."""
        self._what = activity
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None], deadline_s: float) -> None:
        """Begin; first the work under way is waited for, as in `wait`."""
        self.wait(deadline_s)
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=self._what, daemon=True
        )
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Until nothing is under way. Raises what the work raised; DeadlineError after so many
        seconds.
        """
        wait = Countdown(deadline_s)
        while self._thread is not None and not self.is_idle and not wait.is_over:
            self._thread.join(wait.slice_s)
        if not self.is_idle:
            raise DeadlineError(
                f"{self._what} was not over after {deadline_s:.0f} s; the disk may hang: look at it"
                " and its log, then resume from the checkpoint before"
            )
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "trainer_state.json"
ROUNDED = "weights_rounded_to"
"""In `STATE_FILE`: the type of the model's files, where the trainer's own weights are beside the
optimiser's state."""
_OWN = "/own"
"""Behind a parameter's name there."""
FORMAT = 2
DEADLINE_S = Limits().checkpoint_s
"""For a checkpoint to be written, where nobody says how long."""


@dataclass(frozen=True)
class StagedState:
    """Rank 0's part of a checkpoint but for the tensors that each rank writes."""

    module: Any
    gathered: Mapping[str, Tensor] | None
    """Whole weights, where files cannot be written part by part."""
    ranks: int
    deadline_s: float
    """For the ranks' parts."""
    rounded: torch.dtype | None = None
    """Of the weights in the model's files, where they are not the trainer's."""

    def write(self, folder: Path, tokenizer: Any, facts: Mapping[str, int | float | str]) -> None:
        """Write the rest, and wait for all ranks' parts. RunFolderError names the file that cannot
        be written.
        """
        self._write_config(folder)
        if tokenizer is not None:
            with shards.explained(folder / "tokenizer.json"):
                tokenizer.save_pretrained(folder)
        with shards.explained(folder / STATE_FILE):
            rounded = {} if self.rounded is None else {ROUNDED: _text(self.rounded)}
            text = json.dumps({"format": FORMAT, **facts, **rounded}, indent=1) + "\n"
            (folder / STATE_FILE).write_text(text, "utf-8")
        shards.wait_for(folder / OPTIMIZER_FOLDER, self.ranks, self.deadline_s)

    def _write_config(self, folder: Path) -> None:
        if adapters.is_adapted(self.module):
            with shards.explained(folder / ADAPTER_CONFIG):
                adapters.save_config(folder, self.module)
            return
        with shards.explained(folder / "config.json"), no_progress_bar():
            if self.gathered is not None:
                self.module.save_pretrained(folder, state_dict=dict(self.gathered))
                self._name_dtype(folder / "config.json")
                return
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                self.module.save_pretrained(aside, state_dict={})
                for path in Path(aside).iterdir():
                    if path.suffix != shards.SUFFIX:
                        path.replace(folder / path.name)
            self._name_dtype(folder / "config.json")

    def _name_dtype(self, path: Path) -> None:
        if self.rounded is not None:
            config = json.loads(path.read_text("utf-8"))
            for part in (
                config,
                *(part for part in config.values() if isinstance(part, dict) and "dtype" in part),
            ):
                part["dtype"] = _text(self.rounded)
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


@dataclass(frozen=True)
class RankParts:
    """What one rank writes."""

    files: ModelFiles | None
    weights: Mapping[str, Sequence[shards.TensorPart]]
    state: Mapping[str, Sequence[shards.TensorPart]]
    """Of the optimiser, <parameter>/<moment>."""
    rank: int
    ranks: int

    def write(self, folder: Path) -> None:
        """Write them; what goes wrong, rank 0's `StagedState.write` raises."""
        place = folder / OPTIMIZER_FOLDER
        try:
            if self.files is not None:
                self.files.write(self.weights, first=self.rank == 0)
            shards.write(place / shards.file_name(self.rank, self.ranks), self.state)
        except Exception as error:
            shards.give_up(place, self.rank, error)


@dataclass(frozen=True)
class _Writer:
    """What a learner's checkpoints are written with."""

    staging: StagingBuffers
    background: Background


_WRITERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Writer] = weakref.WeakKeyDictionary()
"""By optimiser, of which each learner of this process has one."""


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounded_to(learner: Learner, dtype: str | None) -> torch.dtype | None:
    """What the weights in a checkpoint's files are rounded to: the type that is asked for, or the
    one they came in, of 16 bits; None where these are the trainer's own, as adapters and models
    that keep some layers exact are.
    """
    module = learner.forward.module
    rounded = getattr(module, "came_as", None) if dtype is None else getattr(torch, dtype)
    if (
        rounded not in (torch.bfloat16, torch.float16)
        or adapters.is_adapted(module)
        or module._get_dtype_plan(rounded)
    ):
        return None
    return rounded  # type: ignore[no-any-return]


def nbytes(learner: Learner, dtype: str | None = None) -> int:
    """About how many bytes a checkpoint takes: what is trained, AdamW's two moments of it, what is
    kept beside. dtype: as `rounded_to` has it.
    """
    refreshed_bytes = sum(int(tensor.nbytes) for tensor in tensors_of(learner.refreshed).values())
    copies = 3 if rounded_to(learner, dtype) is None else 3.5
    return (
        round(sum(copies * int(weight.nbytes) for weight in learner.parameters.values()))
        + refreshed_bytes
    )


def prepare(folder: Path) -> None:
    """Make an empty folder ready for `stage`. RunFolderError where the disk refuses."""
    with shards.explained(folder / OPTIMIZER_FOLDER):
        (folder / OPTIMIZER_FOLDER).mkdir(exist_ok=True)


def stage(
    learner: Learner,
    rank: int,
    ranks: int,
    folder: Path,
    deadline_s: float = DEADLINE_S,
    dtype: str | None = None,
) -> StagedState | None:
    """Begin to write this rank's part: for `Learner.everywhere`.

    folder: one that all ranks see, after `prepare`. dtype: as `rounded_to` has it. Rank 0 gets the
    rest, to write it when it likes. Until all ranks have written, which the learner waits for by
    itself, their weights and state have to stay as they are.
    """
    writer = _WRITERS.setdefault(
        learner.optimizer,
        _Writer(StagingBuffers(), Background(f"rank {rank}'s part of a checkpoint")),
    )
    writer.background.wait(deadline_s)
    module = learner.forward.module
    exported, cut = _exported(module), saved_as(module)
    rounded = rounded_to(learner, dtype)
    files = _files(folder, module, exported, cut, rounded)
    gathered: dict[str, Tensor] | None = None
    if files is None:
        gathered = _gathered(exported, rank, rounded)
    copied = writer.staging.copied
    tensors = exported if files is not None else {} if rounded is None else learner.parameters
    weights = {
        name: shards.parts_of(tensor, rank, copied(name)) for name, tensor in tensors.items()
    }
    state = {
        name: shards.parts_of(tensor, rank, copied(name))
        for name, tensor in _state(learner).items()
    }
    if rounded is not None:
        state |= {f"{name}{_OWN}": weights[name] for name in learner.parameters}
    parts = RankParts(files, {} if files is None else weights, state, rank, ranks)
    writer.staging.settle()
    writer.background.start(functools.partial(parts.write, folder), deadline_s)
    if rank:
        return None
    if not all(weight.is_cuda for weight in learner.parameters.values()):
        learner.before_change = functools.partial(_wait_everywhere, learner, deadline_s)
    return StagedState(module, gathered, ranks, deadline_s, rounded)


def written(learner: Learner, rank: int, ranks: int, deadline_s: float) -> None:
    """Wait until this rank's part is written: for `Learner.everywhere`. DeadlineError after so many
    seconds.
    """
    _WRITERS[learner.optimizer].background.wait(deadline_s)


def _wait_everywhere(learner: Learner, deadline_s: float) -> None:
    learner.everywhere(written, deadline_s=deadline_s)


def _files(
    folder: Path,
    module: Any,
    exported: Mapping[str, Any],
    cut: Mapping[str, Any] | None,
    rounded: torch.dtype | None,
) -> ModelFiles | None:
    """The file of each exported tensor; None where only transformers can tell."""
    if adapters.is_adapted(module):
        return ModelFiles.of(folder, exported, {}, adapters.WEIGHTS_FILE, adapters.in_file)
    return None if cut is None else ModelFiles.of(folder, exported, cut, dtype=rounded)


def _gathered(
    exported: Mapping[str, Any], rank: int, rounded: torch.dtype | None
) -> dict[str, Tensor] | None:
    """Whole tensors in main memory on rank 0, put together one by one; all ranks call this."""
    tensors = {}
    for name, tensor in exported.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank == 0:
            dtype = rounded if isinstance(tensor, torch.nn.Parameter) else None
            tensors[name] = full.detach().to("cpu", dtype, copy=True)
    return tensors if rank == 0 else None


def save(
    folder: Path,
    learner: Learner,
    tokenizer: Any,
    facts: Mapping[str, int | float | str],
    rank: int = 0,
    ranks: int = 1,
    dtype: str | None = None,
) -> None:
    """Write a checkpoint and wait for it; called on every rank."""
    prepare(folder)
    staged = stage(learner, rank, ranks, folder, dtype=dtype)
    if staged is not None:
        staged.write(folder, tokenizer, facts)
    written(learner, rank, ranks, DEADLINE_S)


def restore(learner: Learner, rank: int, ranks: int, folder: Path) -> None:
    """Put back the optimiser's state of a checkpoint, and what is kept for refreshed readers: for
    `Learner.everywhere`.

    Whatever number of ranks wrote them. The weights are loaded with the model, from the same
    folder, and put back here where its files have them rounded. Raises RunError when the state does
    not fit.
    """
    state = fresh_state(learner.optimizer, learner.parameters) | tensors_of(learner.refreshed)
    if ROUNDED in read_state(folder):
        state |= {f"{name}{_OWN}": weight.detach() for name, weight in learner.parameters.items()}
    shards.read(folder / OPTIMIZER_FOLDER, state)


def _state(learner: Learner) -> dict[str, Tensor]:
    """The optimiser's, and what is kept for refreshed readers."""
    return state_tensors(learner.optimizer, learner.parameters) | tensors_of(learner.refreshed)


def read_state(folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint. RunError when the folder is none of ours."""
    try:
        state = json.loads((folder / STATE_FILE).read_text("utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, this release reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"'{folder}' cannot be resumed from: its {STATE_FILE} is not readable ({error}); use an"
            " older checkpoint"
        ) from error
    return dict(state)


def _exported(module: Any) -> dict[str, Any]:
    """The tensors that the folder is to hold, each once, under the module's names."""
    if adapters.is_adapted(module):
        return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in named}
    return dict(module.named_parameters()) | buffers


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """What a trainer begins with."""

    model: Model
    """To load: its own, or that of the checkpoint."""
    folder: Path | None = None
    """The checkpoint; None: the model's own weights, and an optimiser that has seen nothing."""
    step: int = 0
    """Steps behind those weights."""
    missing: Sequence[MadeStep] = ()
    """Steps that the ledger has after it, to be made again."""
    last_metrics: Mapping[str, Any] = field(default_factory=dict)
    """The metrics of the last committed step."""


def find_start(model: Model, context: Context) -> StartPoint:
    """Look where to go on, and put right what a crash left: lines of metrics, checkpoints of steps
    taken back.

    Raises RunError when the checkpoint is of another release, or the disk refuses.
    """
    folder, ledger = context.folder, context.ledger
    last = ledger.last_step(context.node) if ledger is not None else 0
    if folder is None or ledger is None:
        return StartPoint(model=model)
    checkpoint = folder.latest_checkpoint(at_most=last, node=context.graph.own_folder)
    checkpoints = folder.checkpoints_of(context.graph.own_folder)
    set_aside(checkpoints, [step for step in checkpoints.steps() if step > last], "taken-back")
    damaged = {
        step: checkpoints.damage(step)
        for step in checkpoints.steps()
        if step > _number_of(checkpoint)
    }
    set_aside(checkpoints, damaged, "damaged")
    for at, damage in damaged.items():
        context.log.warning(
            "a checkpoint is damaged, and an older one is gone on from",
            node=context.node,
            step=at,
            error=damage,
            older=checkpoint.name if checkpoint is not None else "none: from the start",
        )
    if not last:
        return StartPoint(model=model)
    steps = ledger.steps(context.node)
    for line in missing_lines(steps, folder.read_metrics()):
        folder.append_metrics(line)
    step = _step_of(checkpoint)
    if checkpoint is not None:
        model = dataclasses.replace(model, source=str(checkpoint), revision=None)
    missing = [made_step for made_step in steps if made_step.step > step]
    if lost := [
        made_step.step for made_step in missing if made_step.step <= gone(ledger, context.node)
    ]:
        raise RunError(
            f"'{context.node}' cannot come back to step {last}: its newest good checkpoint is of"
            f" step {step}, and the rollouts of steps {some(lost)} after it were not kept ({KNOB});"
            " take a newer checkpoint from a backup, or start a new run"
        )
    if missing:
        context.log.info(
            "catching up",
            node=context.node,
            step=last,
            steps=len(missing),
            checkpoint=checkpoint.name if checkpoint is not None else "none: from the start",
        )
    return StartPoint(
        model=model, folder=checkpoint, step=step, missing=missing, last_metrics=steps[-1].metrics
    )


def missing_lines(
    steps: Iterable[MadeStep], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the ledger knows of steps whose lines of metrics are not there; a line of a step that
    was taken back, and made otherwise, is not that of the step.
    """
    lines_by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for line in lines:
        lines_by_step.setdefault(line.get("step"), []).append(line)
    return [
        dict(step.metrics)
        for step in steps
        if step.metrics
        and not any(
            line.items() >= step.metrics.items() for line in lines_by_step.get(step.step, ())
        )
    ]


def set_aside(checkpoints: Checkpoints, steps: Iterable[int], why: str) -> None:
    """Rename the checkpoints of these steps to <why>-1-step-000100, so that no later start takes
    them for new steps of these numbers. RunFolderError when the disk refuses.
    """
    for folder in map(checkpoints.folder, steps):
        places = (folder.with_name(f"{why}-{at}-{folder.name}") for at in range(1, 1_000_000))
        with disk("renaming", folder):
            folder.rename(next(place for place in places if not place.exists()))


def _number_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.rpartition("-")[2])


def _step_of(folder: Path | None) -> int:
    """A checkpoint's step. RunError where it differs from the folder's name."""
    if folder is None:
        return 0
    step = int(read_state(folder)["step"])
    if folder.name != f"step-{step:06d}":
        raise RunError(
            f"'{folder}' cannot be resumed from: its state is of step {step}; move it away, then an"
            " older checkpoint is taken"
        )
    return step


def expected(context: Context, source: str) -> tuple[int, list[int], int]:
    """The first group still to consume, the later ones that will not come, and how many have an
    outcome.
    """
    if context.ledger is None:
        return 0, [], 0
    following = context.ledger.next_group_id(source)
    in_flight = [group.group_id for group in context.ledger.in_flight(source, context.node)]
    # more may have been issued between the two reads
    waiting = [group for group in in_flight if group < following]
    first = min(waiting, default=following)
    return first, sorted(set(range(first, following)).difference(waiting)), following - len(waiting)


def recorded_drops(context: Context, step: int) -> Counter[str]:
    """Drops by reason that the ledger has of a step which is not committed yet."""
    return (
        Counter()
        if context.ledger is None
        else Counter(context.ledger.drops_at(context.node, step).values())
    )
