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
from dataflow.model_files import PROMISED, PromisedModel
from dataflow.system.child import Child, program
from dataflow.system.clocks import Countdown
from dataflow.system.messages import Channel, Codec, Message

PAD, UNKNOWN = "<pad>", "<unk>"
"""Tokens of every policy beside its characters."""
EOS = "<eos>"
"""The token with which a turn ends."""

RECORD_FILE = "warm_start.json"
"""The file in a finished policy folder that says which spec made it."""

BAD_INPUT = 2
"""Exit status of the training process when it refused its input with one line on stderr."""

RECIPE = 1
"""Raised whenever the same spec would now train another policy, so that old folders are made
anew."""

_COUNTS = (
    "layers",
    "width",
    "heads",
    "mlp_width",
    "max_positions",
    "steps",
    "batch_size",
    "threads",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartSpec:
    """Everything that decides the weights: the same spec gives the same policy on the same
    machine.
    """

    alphabet: str
    """The characters that are tokens, each once, in the order of their ids."""
    layers: int
    """Number of decoder layers."""
    width: int
    """Width of the residual stream, in units."""
    heads: int
    """Number of attention heads; divides `width`."""
    mlp_width: int
    """Width of the gated feed-forward layer, in units."""
    max_positions: int
    """Longest sequence the model is configured for, in tokens."""
    steps: int
    """Number of optimiser steps."""
    batch_size: int
    """Examples per optimiser step."""
    learning_rate: float
    """Peak learning rate of AdamW; warmed up over 20 steps, then falling linearly to a tenth."""
    seed: int
    """Seeds the initial weights and the order of the examples."""
    threads: int
    """Number of threads torch computes with."""
    examples_sha256: str
    """Digest of the examples file."""

    def __post_init__(self) -> None:
        """Refuse what could not be trained.

        Raises:
            GraphError: with what is wrong, what was found and what to do next.
        """
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise GraphError(
                "the alphabet of a warm start must name each character once; found"
                f" {self.alphabet!r}; pass a string without repetitions"
            )
        for field in _COUNTS:
            if (number := getattr(self, field)) < 1:
                raise GraphError(
                    f"{field} of a warm start must be 1 or more; found {number}; raise it"
                )
        if self.width % (2 * self.heads):
            raise GraphError(
                f"width of a warm start must be a multiple of twice its heads; found {self.width}"
                f" with heads={self.heads}; try"
                f" {2 * self.heads * max(1, self.width // (2 * self.heads))}"
            )
        if not 0 < self.learning_rate < 1:
            raise GraphError(
                "learning_rate of a warm start must lie between 0 and 1; found"
                f" {self.learning_rate}; try 1e-3"
            )

    @property
    def vocabulary(self) -> int:
        """Tokens: the characters, and those of every policy."""
        return len(self.alphabet) + len((PAD, EOS, UNKNOWN))

    def promise(self) -> PromisedModel:
        """What the policy's files will hold, for an explanation that does not make them."""
        config = {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": True,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.max_positions,
        }
        wide, high = [self.mlp_width, self.width], [self.width, self.mlp_width]
        layer = {f"self_attn.{name}_proj": [self.width, self.width] for name in "qkvo"}
        layer |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": high}
        layer |= {"input_layernorm": [self.width], "post_attention_layernorm": [self.width]}
        shapes = {
            "model.embed_tokens.weight": [self.vocabulary, self.width],
            "model.norm.weight": [self.width],
        }
        for number in range(self.layers):
            shapes |= {
                f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()
            }
        return PromisedModel(
            config=config, shapes=shapes, how=f"a warm start of {self.steps} steps"
        )

    @property
    def fingerprint(self) -> str:
        """Hex digest of every field and of the recipe: equal fingerprints mean the same policy."""
        fields = {"recipe": RECIPE, **dataclasses.asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def recorded_fingerprint(folder: Path) -> str | None:
    """The fingerprint that a finished policy folder records, or None where there is none to
    read.
    """
    try:
        record = json.loads((folder / RECORD_FILE).read_text("utf-8"))
    except (OSError, ValueError):  # absent, unreadable or cut short: not a finished folder
        return None
    fingerprint = record.get("fingerprint") if isinstance(record, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


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
