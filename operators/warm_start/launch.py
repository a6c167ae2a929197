"""Makes a small warm-started policy in a process of its own, once per spec."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import GraphError, RunError
from dataflow.model_files import PROMISED
from dataflow.system.channel import Channel
from dataflow.system.child import Child, program
from dataflow.system.clocks import Countdown
from dataflow.system.messages import Codec, Message
from operators.warm_start.spec import BAD_INPUT, RECORD_FILE, WarmStartSpec, recorded_fingerprint


class Progress(Message):
    """From the process that trains: so many steps are done."""

    step: int
    loss: float


CODEC = Codec("warm-start", 1, Progress)

Report = Callable[[int, float], None]
"""Called after every step with the number of steps done and that step's loss (nats per answer
token)."""


@contextmanager
def shown(title: str, steps: int) -> Iterator[Report]:
    """Give a report function that shows progress on stderr until the block ends."""
    if sys.stderr.isatty():
        with _bar(title, steps) as report:
            yield report
    else:
        yield _lines(title, steps)


def _lines(title: str, steps: int) -> Report:
    marks = {max(1, round(steps * tenth / 10)) for tenth in range(1, 11)}

    def report(step: int, loss: float) -> None:
        if step in marks:
            print(f"{title}: step {step}/{steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bar(title: str, steps: int) -> Iterator[Report]:
    from rich import progress as bars
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"))

        def report(step: int, loss: float) -> None:
            progress.update(task, completed=step, loss=loss)

        yield report


_TRIES = 3
"""For a process that is killed."""
_END_S = 20.0
"""For the process to end when it has closed its channel."""


class WarmStartError(RunError):
    """The process that trains the policy failed, or did not end in time."""


def warm_start(
    folder: str | Path,
    *,
    examples: Iterable[tuple[str, str]],
    alphabet: str,
    layers: int,
    width: int,
    heads: int,
    steps: int,
    seed: int,
    mlp_width: int | None = None,
    max_positions: int = 64,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    threads: int = 1,
    timeout_s: float = 1800.0,
) -> Path:
    """Make a small Llama, train it on (prompt, answer) pairs, and return its Hugging Face folder.

    The policy is trained by `python -m operators.warm_start` in a process of its own, so the caller
    never imports torch. A folder made earlier from the same arguments and examples is returned as
    it is; one made from others is replaced, in one rename, when the new policy is complete. The
    same arguments give the same weights: the work is bounded by `steps`, not by time. An
    explanation (--explain, --draw, --foresee) trains nothing: the folder is promised.

    Args:
        folder: where the policy will stand.
        examples: (prompt, answer) pairs; the model learns to write the answer and the end token.
        alphabet: every character that prompts and answers use, each once.
        mlp_width: units of the feed-forward layer; three times `width` where it is None.
        max_positions: longest prompt with answer and end token, in tokens.
        threads: torch threads of the process that trains.
        timeout_s: after so many seconds the process is ended and a WarmStartError raised.

    Raises:
        GraphError: an argument or an example that could not be trained; or `folder` exists and was
            not made by a warm start.
        WarmStartError: the process failed or took too long.
    """
    target = Path(folder).absolute()
    if target.exists() and recorded_fingerprint(target) is None:
        raise GraphError(
            f"a warm start would replace {target}, which it did not make; found a folder or file"
            f" without {RECORD_FILE}; name another folder or remove that one"
        )
    if PROMISED.get(None) is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent if target.parent.is_dir() else None, prefix=f".{target.name}-"
    ) as name:
        work = Path(name)
        spec = WarmStartSpec(
            alphabet=alphabet,
            layers=layers,
            width=width,
            heads=heads,
            mlp_width=3 * width if mlp_width is None else mlp_width,
            max_positions=max_positions,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            threads=threads,
            examples_sha256=_write_examples(work / "examples.jsonl", examples),
        )
        if recorded_fingerprint(target) == spec.fingerprint:
            return target
        if (promises := PROMISED.get(None)) is not None:
            promises[str(target)] = spec.promise()
            return target
        (work / "spec.json").write_text(json.dumps(dataclasses.asdict(spec)), "utf-8")
        with shown(f"warm start of {target.name}", steps) as report:
            _train(work, spec, report, timeout_s)
        _put_in_place(work, target, spec.fingerprint)
    return target


def _write_examples(path: Path, examples: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for prompt, answer in examples:
            line = json.dumps([prompt, answer]).encode() + b"\n"
            digest.update(line)
            out.write(line)
    if not path.stat().st_size:
        raise GraphError(
            "a warm start needs examples; found none; pass at least one (prompt, answer) pair"
        )
    return digest.hexdigest()


def _train(work: Path, spec: WarmStartSpec, report: Report, timeout_s: float) -> None:
    """Have a process make the policy; it is started again where it is killed, as a worker is."""
    wait = Countdown(timeout_s)
    for tries_left in reversed(range(_TRIES)):
        status, last, process = _train_once(work, spec, report, wait, timeout_s)
        if not status:
            return
        if status == BAD_INPUT:
            raise GraphError(process.last_words)
        if status > 0 or not tries_left:
            raise WarmStartError(
                f"the process of a warm start failed; found exit status {status} after {last} of "
                f"{spec.steps} steps; it said: {process.last_words or 'nothing'}"
            )
        print(
            f"the process of a warm start {process.state}; it is started again",
            file=sys.stderr,
        )
        shutil.rmtree(work / "policy", ignore_errors=True)


def _train_once(
    work: Path, spec: WarmStartSpec, report: Report, wait: Countdown, timeout_s: float
) -> tuple[int, int, Child]:
    """Exit status, steps made, and the process."""
    channel, theirs = Channel.pair(CODEC)
    with contextlib.closing(channel):
        with theirs:
            process = program(
                "operators.warm_start",
                str(work),
                "--parent",
                end=theirs,
                words=True,
                stdin=subprocess.DEVNULL,
                environment={"OMP_NUM_THREADS": str(spec.threads)},
            )
        last = 0
        try:
            while True:
                if channel.readable(wait.slice_s):
                    for progress in channel.arrived():
                        last = progress.step
                        report(last, progress.loss)
                elif wait.is_over:
                    raise WarmStartError(
                        f"a warm start did not end in time; found {last} of {spec.steps} steps done"
                        f" after {timeout_s:g} s; raise timeout_s or lower steps"
                    )
        except EOFError:
            return process.end(_END_S), last, process
        finally:
            process.end(0.0)


def _put_in_place(work: Path, target: Path, fingerprint: str) -> None:
    if recorded_fingerprint(work / "policy") != fingerprint:
        names = sorted(path.name for path in work.glob("policy/*"))
        raise WarmStartError(
            f"a warm start ended without a complete policy; found {names}; check the disk's free"
            " space and run again"
        )
    if target.exists():
        target.rename(work / "replaced")
    try:
        (work / "policy").rename(target)
    except OSError:
        if recorded_fingerprint(target) != fingerprint:
            raise
    shutil.rmtree(work / "replaced", ignore_errors=True)
