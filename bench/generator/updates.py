"""What new weights every 50 ms cost the whole generator, reader and all: `python -m bench.generator
--updates`.

The weights come from a process of its own over shared memory, as from a trainer. It uses the
processor too, which an own machine or core would not charge to the generator, so three systems take
turns:

still      no version after the first; the publisher sleeps.
elsewhere  the publisher writes a version every 50 ms, to a plane that nobody reads.
updates    it writes them to the generator's plane, and the generator adopts them.

lost_percent is of tokens per second against `elsewhere` in the same turn: the reader's cost, which
is the claim; lost_with_publisher_percent is against `still`. held_ms: how long an update holds up
vLLM, the median.
"""

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from bench.generator.cases import CONTEXT_TOKENS, EVEN_TOKENS, GROUP_SIZE, Load, make_load, text_of
from bench.report import Figure, Report
from dataflow.records import MASK

INTERVAL_S = 0.05
WAIT_S = 120.0
"""Longest wait for the publisher's first version, and for its end."""
BEAT_S = 0.005
"""How often the publisher answers its readers."""
ARMS = ("still", "elsewhere", "updates")


def measure_updates(
    policy: Path, in_flight: int, precision: str, options: argparse.Namespace, report: Report
) -> None:
    """A row for each arm, of medians over the repeats."""
    load = make_load(
        "even", in_flight=in_flight, rollouts=options.turnover * in_flight, size=options.model
    )
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    adopted: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with planes(policy, precision) as (address, tell):
        generator = Generating(policy, load, precision, options, address)
        held: list[float] = []
        try:
            generator.run(load.first(in_flight))
            for _ in range(options.repeats):
                for arm in ARMS:
                    tell(arm)
                    tokens, seconds, versions = generator.run(load)
                    rates[arm].append(tokens / seconds)
                    adopted[arm].append(versions / seconds)
                tell("still")
            held = generator.held_s
        finally:
            generator.close()
    for arm in ARMS:
        figures: dict[str, Figure] = {
            "in_flight": in_flight,
            "threads": options.threads,
            "precision": precision,
            "model": options.model,
            "tokens_per_s": statistics.median(rates[arm]),
            "adopted_per_s": statistics.median(adopted[arm]),
            "lost_percent": lost(rates[arm], rates["elsewhere"]) if arm == "updates" else None,
            "lost_with_publisher_percent": lost(rates[arm], rates["still"])
            if arm == "updates"
            else None,
            "rollouts": len(load.lengths),
            "repeats": options.repeats,
            "interval_ms": 1000 * INTERVAL_S,
            "engine": options.engine,
            "held_ms": 1000 * statistics.median(held) if held and arm == "updates" else None,
        }
        report.add(case="updates", system=arm, **figures)


def lost(mine: list[float], others: list[float]) -> float:
    """Share of the others' pace that is missing, turn by turn: the median, in percent."""
    return statistics.median(100 * (1 - a / b) for a, b in zip(mine, others, strict=True))


class Generating:
    """A GeneratorRuntime with a reader of shared memory, as a worker hosts it."""

    def __init__(
        self, policy: Path, load: Load, precision: str, options: argparse.Namespace, address: str
    ) -> None:
        """Build it and wait for the first version. Raises TimeoutError."""
        from dataflow.limits import Limits
        from dataflow.model import Model
        from dataflow.runtime import Context, DeviceShare, WeightEnds
        from dataflow.weight_ends import OpensWeights, WeightSite
        from dataflow.worker.weight_ports import open_reader
        from operators.generator import Generator

        self._reader: Any = None
        site = WeightSite(
            executor="shared_memory",
            is_sharded=False,
            address=address,
            folder="",
            name="generator-0",
        )

        def opened(tensors: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]) -> Any:
            self._reader = open_reader(site, 0, "cpu", tensors, slices, limits=Limits(), attempt=0)
            return self._reader

        declaration = Generator(
            Model(str(policy), dtype=precision),
            group_size=GROUP_SIZE,
            max_tokens=EVEN_TOKENS,
            slots=load.in_flight,
            context_tokens=CONTEXT_TOKENS,
            engine=options.engine,
        )
        self._runtime: Any = declaration.build(
            Context(
                node="generator",
                devices=DeviceShare(threads=options.threads),
                weights=WeightEnds(reader=OpensWeights(opened, site)),
            )
        )
        self._issued = 0

    def run(self, load: Load) -> tuple[int, float, int]:
        """Push all prompts and work until every rollout is done: tokens, seconds, versions
        adopted.
        """
        from dataflow.runtime import Batch

        before, tokens = self._version(), 0
        began = time.perf_counter()
        self._runtime.push(Batch("train", self._prompts(load)))
        while self._runtime.pending():
            for batch in self._runtime.work() or ():
                tokens += _drawn(batch.records)
            if time.perf_counter() - began > WAIT_S and not tokens:
                raise TimeoutError(
                    f"no rollout was done after {WAIT_S:g} s; found version {self._version()}"
                )
        return tokens, time.perf_counter() - began, self._version() - before

    @property
    def held_s(self) -> list[float]:
        """How long updates held decoding up, as far as the engine tells, in seconds."""
        return list(getattr(self._runtime.engine, "held_s", ()))

    def close(self) -> None:
        """End the engine, and leave the plane."""
        self._runtime.close()
        if self._reader is not None:
            self._reader.close()

    def _version(self) -> int:
        return max(0, int(self._runtime.engine.version))

    def _prompts(self, load: Load) -> pa.RecordBatch:
        count, first = len(load.prompts), self._issued
        self._issued += count
        return pa.record_batch(
            {
                "group_id": pa.array(range(first, first + count), pa.int64()),
                "prompt_id": pa.array([str(i) for i in range(count)]),
                "prompt": pa.array([text_of(prompt) for prompt in load.prompts]),
                "group_size": pa.array([0] * count, pa.int32()),
                "min_version": pa.array([0] * count, pa.int32()),
                "round_size": pa.array([0] * count, pa.int32()),
            }
        )


def _drawn(records: pa.RecordBatch) -> int:
    """Tokens that the policy chose."""
    return int(records.column(MASK).flatten().true_count)


@contextmanager
def planes(policy: Path, precision: str) -> Iterator[tuple[str, Any]]:
    """A publisher process: the address of the plane that it serves, and how to tell it which arm is
    on.
    """
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/{name}" for name in ("served", "elsewhere")]
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.generator.updates", *addresses, str(policy), precision],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert child.stdin is not None, "it was opened with a pipe"
        pipe: IO[bytes] = child.stdin

        def tell(arm: str) -> None:
            pipe.write(f"{arm}\n".encode())
            pipe.flush()

        try:
            yield addresses[0], tell
        finally:
            pipe.close()
            try:
                child.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def publish(served: str, elsewhere: str, policy: Path, precision: str) -> None:
    """The publisher: versions of the policy to either plane, as the arm that is named on stdin
    says, until its end.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from operators.models.loading import no_progress_bar
    from transport.weights import FlatLayout, WeightWriter

    torch.set_num_threads(1)
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, precision))
    tensors = dict(model.named_parameters())
    writers = {"updates": WeightWriter(FlatLayout.of(tensors, dtype=precision), served)}
    writers["elsewhere"] = WeightWriter(FlatLayout.of(tensors, dtype=precision), elsewhere)
    writers["updates"].publish(0, tensors)
    arm, version, due = "still", 0, time.monotonic()
    try:
        while True:
            wait_s = BEAT_S if arm == "still" else max(0.0, min(BEAT_S, due - time.monotonic()))
            if select.select([0], [], [], wait_s)[0]:
                line = os.read(0, 64)
                if not line:
                    return
                arm, due = line.decode().split()[-1], time.monotonic()
            for writer in writers.values():
                writer.poll()
            if arm in writers and time.monotonic() >= due:
                version += 1
                writers[arm].publish(version, tensors)
                due = max(due + INTERVAL_S, time.monotonic())
    finally:
        for writer in writers.values():
            writer.close()


if __name__ == "__main__":
    publish(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
