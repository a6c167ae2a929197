"""Time and bandwidth on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch


def measure_bandwidth(device: torch.device, nbytes: int, repeats: int = 10) -> float:
    """Bytes per second: the better of a copy, read plus written, and a sum, read."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, repeats)
    read = seconds_of(lambda: source.sum(), device, repeats)
    return max(2 * source.nbytes / copy, source.nbytes / read)


def seconds_in_graph(calls: Callable[[], None], device: torch.device) -> float:
    """Median of several runs, replayed as a graph where there is a GPU."""
    calls()
    if device.type != "cuda":
        return seconds_of(calls, device, 3)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    return seconds_of(graph.replay, device, 20)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of several runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        wait(device)
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            work()
            last.record()
            last.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clear(device: torch.device) -> None:
    """Give back memory that nothing holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
