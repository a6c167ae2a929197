"""The generator on a GPU: its gpu-marked tests, tokens per second, and the share of the memory
bandwidth that it uses.

    python -m bench.gpu --json FILE

256 rollouts of 1,024 tokens, in groups of 8 that share a prompt of 200 tokens, by Qwen-shaped
models of random weights in bfloat16. Systems: hf_dynamic and hf_static, `model.generate` on one
static batch with either cache; eager, our engine with torch's operators; triton, with its attention
and drawing kernels; graphs, the same with decode steps replayed as CUDA graphs; fused, with
compiled layers besides.

roofline_share: the time that reading weights and every row's keys and values takes at the bandwidth
measured in the same run, over the time taken. floor_share: the same with the pages of a shared
prompt counted once per group.

shared: a whole graph with generator and trainer on this GPU, see bench.gpu.shared.
public: nano-vllm's benchmark of 256 requests, see bench.gpu.public.
vllm: the same on vLLM, which takes versions meanwhile, see bench.gpu.vllm.
attention: one layer's decode attention by itself, for several tilings of the kernel.
weights: new versions from one process to another on the same GPU, see bench.gpu.weights.
trainer: one training step of a 1.7 B model in several ways, see bench.gpu.trainer.

A row that exceeds its time stops there, and `tokens` says how far it came; what does not fit into
--minutes is skipped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from bench.gpu.attention import measure_attention
from bench.gpu.public import measure_public
from bench.gpu.shared import measure_shared
from bench.gpu.systems import (
    HF,
    MODELS,
    OURS,
    TINY,
    TINY_LOAD,
    Load,
    Run,
    Shape,
    bytes_read,
    hf,
    make_model,
    ours,
)
from bench.gpu.timing import clear, measure_bandwidth
from bench.gpu.trainer import TRAINER_S, measure_trainer
from bench.gpu.vllm import measure_vllm
from bench.gpu.weights import WEIGHTS_S, measure_weights
from bench.report import Figure, Report

ROOT = Path(__file__).parents[2]
PARTS = ("shared", "public", "vllm", "tests", "weights", "ours", "trainer", "attention", "hf")
"""In this order, the synchronous graph of `shared` after all but hf."""
TESTS_S, OURS_S, HF_S, ATTENTION_S = 120.0, 20.0, 30.0, 30.0
"""Most seconds of each part: of a row, for ours and hf."""
HF_LEAST_S = {"hf_dynamic": 40.0, "hf_static": 150.0}
"""Not begun with less time than this: with a static cache, transformers compiles the model
first."""
WIDE = 160
"""Characters of the table."""
TEST_PROCESSES = 6
"""That share the GPU; most of a test is the start of its processes."""
MARK = "mark.gpu"


class Clock:
    """What is left of the time for everything."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        """`seconds` from now."""
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - self._now()

    def grant(self, most: float, least: float) -> float | None:
        """Up to `most` seconds; None when there are not even `least`."""
        return min(most, self.left) if self.left >= least else None


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when a test or a system failed, 2 where there is no
    GPU.
    """
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"bench.gpu needs a GPU; torch {torch.__version__} finds none (built for CUDA"
            f" {torch.version.cuda}); run it on a machine that has one, or try the code with"
            " --device cpu --tiny",
            file=sys.stderr,
        )
        return 2
    report, clock = Report("gpu", options.json), Clock(options.minutes * 60)
    models, load = (TINY, TINY_LOAD) if options.tiny else (MODELS, Load())
    parts = options.only or PARTS
    failed = False
    if "shared" in parts:
        failed |= not measure_shared(report, "async", clock.left, device, options.tiny)
    if "public" in parts:
        failed |= not measure_public(report, lambda: clock.left, device, options.tiny)
    if "vllm" in parts:
        failed |= not measure_vllm(report, lambda: clock.left, device, options.tiny)
    if "tests" in parts:
        failed |= not _tests(device, clock, report)
    bandwidth = measure_bandwidth(device, 1 << (24 if options.tiny else 32))
    report.add(case="machine", system=_name(device), bytes_per_s=bandwidth, torch=torch.__version__)

    def measure(system: str, run: Callable[..., Run], most: float, least: float) -> bool:
        done = True
        for name, shape in models.items():
            print(f"{name} {system}: {clock.left:.0f} s left", flush=True)
            granted = clock.grant(most, least)
            done &= _row(report, granted, device, bandwidth, name, system, shape, run, load)
        return done

    if "weights" in parts:
        failed |= not measure_weights(report, min(WEIGHTS_S, clock.left), device, options.tiny)
    if "ours" in parts:
        for system in _served(device):
            failed |= not measure(system, ours, OURS_S, OURS_S)
    if "trainer" in parts:
        failed |= not measure_trainer(report, min(TRAINER_S, clock.left), device, options.tiny)
    if "attention" in parts:
        measure_attention(report, min(ATTENTION_S, clock.left), device, bandwidth, models, load)
    if "shared" in parts:
        failed |= not measure_shared(report, "sync", clock.left, device, options.tiny)
    if "hf" in parts:
        for system in HF:
            failed |= not measure(system, hf, HF_S, HF_LEAST_S[system])
    report.show(Console(width=WIDE))
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="parts to run; may be given again"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and few tokens, to try the code"
    )
    return parser


def _row(
    report: Report,
    granted: float | None,
    device: torch.device,
    bandwidth: float,
    name: str,
    system: str,
    shape: Shape,
    run: Callable[..., Run],
    load: Load,
) -> bool:
    """One line of the report; whether it did not fail."""
    if granted is None:
        report.add(case=name, system=system, skipped="too little time is left")
        return True
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = make_model(shape, device, dtype).requires_grad_(False)
        sizes = model.config
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        weight = next(model.parameters())
        token_bytes = (
            2 * sizes.num_hidden_layers * sizes.num_key_value_heads * width * weight.element_size()
        )
        weights = sum(parameter.nbytes for parameter in model.parameters())
        outcome = run(model, system, load, granted)
    except Exception as error:
        traceback.print_exc()
        report.add(
            case=name, system=system, skipped=f"failed: {type(error).__name__}: {str(error)[:200]}"
        )
        return False
    finally:
        model = weight = None
        clear(device)
    tokens = sum(outcome.lengths)
    counted = {
        f"{kind}_share": (
            bytes_read(outcome.lengths, load, weights, token_bytes, shared=shared)
            / bandwidth
            / outcome.seconds
        )
        for kind, shared in (("roofline", False), ("floor", True))
    }
    figures: dict[str, Figure] = {
        "tokens_per_s": tokens / outcome.seconds,
        **counted,
        "tokens": max(outcome.lengths, default=0),
        "seconds": outcome.seconds,
        "warm_s": outcome.warm_s,
    }
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    report.add(
        case=name, system=system, **figures, **({"note": outcome.note} if outcome.note else {})
    )
    return True


def _tests(device: torch.device, clock: Clock, report: Report) -> bool:
    """Run the gpu-marked tests; whether they passed."""
    if device.type != "cuda":
        report.add(case="tests", system="pytest -m gpu", skipped="no GPU")
        return True
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-W",
        "default",
        "-n",
        str(TEST_PROCESSES),
        "--timeout",
        "90",
        "-p",
        "no:cacheprovider",
        *marked(ROOT / "tests"),
    ]
    started = time.monotonic()
    try:
        status = subprocess.run(
            command, cwd=ROOT, timeout=min(TESTS_S, clock.left), check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = -1
    seconds = time.monotonic() - started
    report.add(case="tests", system="pytest -m gpu", status=status, seconds=seconds)
    return status == 0


def marked(folder: Path) -> list[str]:
    """The files of tests that need a GPU: to collect all others takes longer than to run these."""
    return sorted(str(path) for path in folder.rglob("test_*.py") if MARK in path.read_text())


def _served(device: torch.device) -> list[str]:
    """Ways of our engine that can be tried here: layers are compiled for a GPU only."""
    return [
        system for system, choice in OURS.items() if device.type == "cuda" or not choice["fused"]
    ]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
