"""What this machine's processor can do at most: products in each number format, and reading memory;
as measured.

    python -m bench.peaks

Products: the faster of multiply-adds whose sums stay in registers (peaks.c; where there is a C
compiler) and of torch's product of two large squares. One operation is a multiplication or an
addition. Run it on an idle machine.
"""

import argparse
import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.report import Report
from dataflow.system.native import compiled
from operators.engine.attention import huge_pages

DTYPES = ("float32", "bfloat16", "int8")
SIDE = 2048
"""Of the squares."""
ROUNDS = 2_000_000
"""Of multiply-adds in registers: some milliseconds."""
READ_BYTES = 1 << 27
"""That each thread reads: far more than caches hold."""
TRIES = 20
"""The fastest counts: whatever disturbs a try makes it slower."""


def matmul_peak(dtype: str, threads: int) -> float:
    """Operations per second of products in `dtype` (float32, bfloat16 or int8) on so many
    threads.
    """
    return max(registers_peak(dtype, threads), library_peak(dtype, threads))


def registers_peak(dtype: str, threads: int) -> float:
    """Operations per second where nothing waits for memory; 0 where the processor has no such
    instruction.
    """
    lib = _library()
    operations = 0 if lib is None else int(getattr(lib, f"peak_{dtype}")())
    if not operations:
        return 0.0
    multiply = getattr(lib, f"multiply_{dtype}")
    return threads * ROUNDS * operations / _fastest(lambda _: multiply(ROUNDS), threads)


def library_peak(dtype: str, threads: int) -> float:
    """Operations per second of torch's product of two squares."""
    if dtype == "int8":
        x, y = (torch.randint(-9, 9, (SIDE, SIDE), dtype=torch.int8) for _ in range(2))
        multiply: Callable[[], Any] = lambda: torch._int_mm(x, y.t())  # noqa: E731
    else:
        a, b = (torch.randn(SIDE, SIDE).to(getattr(torch, dtype)) for _ in range(2))
        multiply = lambda: a @ b.t()  # noqa: E731
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 2 * SIDE**3 / _fastest(lambda _: multiply(), 1)
    finally:
        torch.set_num_threads(before)


def read_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads together read from memory, end to end, on huge
    pages.
    """
    memory = [huge_pages(READ_BYTES).fill_(1) for _ in range(threads)]
    lib = _library()

    def read(thread: int) -> None:
        if lib is None:
            memory[thread].view(torch.int64).sum()
        else:
            lib.read_memory(ctypes.c_void_p(memory[thread].data_ptr()), ctypes.c_int64(READ_BYTES))

    return threads * READ_BYTES / _fastest(read, threads)


def _fastest(work: Callable[[int], Any], threads: int) -> float:
    """Seconds until all threads have done `work(thread)` once."""
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(TRIES):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            best = min(best, time.perf_counter() - began)
    return best


@functools.cache
def _library() -> ctypes.CDLL | None:
    lib = compiled((Path(__file__).with_suffix(".c"),), (("-O3", "-std=gnu11"),))
    if lib is not None:
        lib.read_memory.restype = ctypes.c_double
        for dtype in DTYPES:
            multiply, peak = getattr(lib, f"multiply_{dtype}"), getattr(lib, f"peak_{dtype}")
            multiply.argtypes, multiply.restype, peak.restype = (
                (ctypes.c_int64,),
                ctypes.c_double,
                ctypes.c_int64,
            )
    return lib


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peaks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    options = parser.parse_args()
    report = Report("peaks", options.json)
    for threads in options.threads:
        for dtype in DTYPES:
            registers, library = registers_peak(dtype, threads), library_peak(dtype, threads)
            report.add(
                case="products, operations per second / 1e9",
                system=dtype,
                threads=threads,
                registers=registers / 1e9,
                torch=library / 1e9,
                peak=max(registers, library) / 1e9,
            )
        report.add(
            case="memory, GB per second",
            system="read",
            threads=threads,
            read=read_bandwidth(threads) / 1e9,
        )
    report.show(Console())


if __name__ == "__main__":
    main()
