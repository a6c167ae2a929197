"""What a run folder costs: verify after many steps; a step's file in size and time: python -m
bench.run_folder.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.report import Report
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, schema

PROMPTS, GROUP = 32, 8
"""Of a step, as in the demo."""
BOUND = 4


def step_rows(step: int, first: int, prompts: int, group: int, tokens: int) -> pa.Table:
    """Rollouts of whole groups, of half to one and a half times so many tokens, as a generator
    leaves them.
    """
    random = np.random.default_rng(step)
    rows = prompts * group
    ids = np.repeat(np.arange(first, first + prompts), group)
    lengths = random.integers(max(1, tokens // 2), tokens + tokens // 2 + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    # words are as uneven as that
    drawn = np.minimum(random.zipf(1.3, total), 50_000).astype(np.int32)
    chosen = np.ones(total, bool)
    chosen[offsets[:-1]] = False
    versions = np.where(chosen, max(0, step - 1 - step % 3), -1).astype(np.int32)

    def ragged(values: np.ndarray) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    columns_made = {
        "group_id": ids,
        "prompt_id": ids.astype(str),
        "prompt": [f"sort {number}" for number in ids],
        "group_size": np.full(rows, group, np.int32),
        "min_version": np.zeros(rows, np.int32),
        "round_size": np.zeros(rows, np.int32),
        "rollout_id": ids * group + np.tile(np.arange(group), prompts),
        "position": np.tile(np.arange(group, dtype=np.int32), prompts),
        "completion": [" ".join(map(str, drawn[a:b])) for a, b in itertools.pairwise(offsets)],
        "tokens": ragged(drawn),
        "mask": ragged(chosen),
        "versions": ragged(versions),
        "logprobs": ragged(
            np.where(chosen, -random.exponential(1.0, total), 0.0).astype(np.float32)
        ),
        "finish_reason": ["stop"] * rows,
        "error": pa.nulls(rows, pa.string()),
    }
    columns = {**PROMPT_COLUMNS, **ROLLOUT_COLUMNS}
    return pa.table({name: columns_made[name] for name in columns}, schema(columns))


def make(
    root: Path, steps: int, prompts: int = PROMPTS, group: int = GROUP, tokens: int = 12
) -> RunFolder:
    """The folder of a run of so many steps, by the writers of runs; each tenth step dropped a
    group, too.
    """
    folder = RunFolder.create(root, "bench")
    place = 0
    with Ledger.create(folder.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.set_facts(
            {"graph": {"name": "bench"}, "config": {"max_staleness": {"trainer": BOUND}}}
        )
        for step in range(1, steps + 1):
            drops = {place + prompts: "stale"} if step % 10 == 0 else {}
            ids = range(place, place + prompts + len(drops))
            ledger.issue("prompts", [(number, f"task-{number % 1000}") for number in ids])
            folder.rollouts_of().write(step, step_rows(step, place, prompts, group, tokens))
            metrics = {
                "step": step,
                "node": "trainer",
                "loss": 0.5,
                "dropped": {"stale": 1} if drops else {},
            }
            ledger.commit_step(
                "trainer",
                step,
                version=step,
                source="prompts",
                trained=ids[:prompts],
                dropped=drops,
                metrics=metrics,
            )
            folder.append_metrics(metrics)
            place = ids.stop
    return folder


def seconds(
    work: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median of so many calls."""
    durations = []
    for _ in range(times):
        began = clock()
        work()
        durations.append(clock() - began)
    return statistics.median(durations)


def measure_verify(report: Report, folder: RunFolder, times: int) -> None:
    """Seconds to judge a folder."""
    steps = len(list(folder.rollouts.glob("step-*.arrow")))
    verdict = verify(folder.path)
    report.add(
        case=f"{steps:,} steps",
        system="dataflow verify",
        seconds=seconds(lambda: verify(folder.path), times),
        processor_seconds=seconds(lambda: verify(folder.path), times, time.process_time),
        clean=str(verdict.clean),
    )


def measure_files(report: Report, tokens: int, prompts: int, times: int) -> None:
    """Bytes of a step's file, and milliseconds to write and to read it, with each codec."""
    rows = step_rows(1, 0, prompts, GROUP, tokens)
    for codec in (None, pa.Codec("lz4"), pa.Codec("zstd", 1), pa.Codec("zstd", 3)):
        content = encoded(rows, codec)
        name = f"{codec.name}, level {codec.compression_level}" if codec else "as it is"
        report.add(
            case=f"{prompts * GROUP} rollouts of {tokens:,} tokens",
            system=name,
            megabytes=len(content) / 1e6,
            write_ms=1e3 * seconds(lambda codec=codec: encoded(rows, codec), times),  # type: ignore[misc]
            read_ms=1e3 * seconds(lambda content=content: decoded(content), times),  # type: ignore[misc]
        )


def encoded(rows: pa.Table, codec: pa.Codec | None) -> pa.Buffer:
    """An Arrow file in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def decoded(content: pa.Buffer) -> None:
    """Read and check it whole."""
    pa.ipc.open_file(content).read_all().validate(full=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to make the run, and keep it; a temporary one if left out",
    )
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    report = Report("run_folder", how.json)
    with tempfile.TemporaryDirectory() as temporary:
        root = how.folder or Path(temporary)
        folder = (
            RunFolder.open(root / "latest") if (root / "latest").exists() else make(root, how.steps)
        )
        measure_verify(report, folder, how.times)
    for tokens, prompts, times in ((12, PROMPTS, 100), (200, 64, 20), (8000, 8, 5)):
        measure_files(report, tokens, prompts, times)
    report.show()
