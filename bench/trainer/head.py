"""The trainer's last layer and log-probabilities: forward and backward with all logits at once, and
slice by slice.

    python -m bench.trainer.head --json FILE

Systems: log_softmax, all logits, their log-softmax, and the target's place in it; logsumexp, the
target's logit less the logarithm of the row's sum; sliced, operators.training.learner.head. The
systems take turns; figures are

seconds       median of a forward and backward pass from hidden states to the gradients of these and
              of the weight
cpu_s         the same in seconds of processor time, which other work on the machine disturbs less
time_ratio, cpu_ratio   log_softmax's over this system's, median of the turns: above 1 is faster
peak_mib      how far memory rose above what hidden states and weight hold: once in a process of its
              own, from the kernel's mark of resident memory (VmHWM, set back before), on a GPU from
              torch's allocator. The weight's gradient is part of it: `gradient_mib` of every
              system's
peak_share    of log_softmax's peak_mib; above_gradient_share: the same without gradient_mib on
              either side
gap           largest difference from log_softmax's log-probabilities
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.timing import clear, wait
from bench.report import Figure, Report
from operators.training.learner.head import Shape, Wanted, logprobs_of_hidden

PEAK_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Case:
    """What the head is computed for; the hidden states and weights are random."""

    vocabulary: int = 150_000
    width: int = 512
    tokens: int = 1_024
    entropy: bool = False
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """As it stands in the report."""
        tail = " and entropy" if self.entropy else ""
        return f"head {self.vocabulary} x {self.width}, {self.tokens} tokens, {self.dtype}{tail}"


CASES = (
    Case(),
    Case(width=1_024),
    Case(entropy=True),
    Case(vocabulary=32_000, width=1_024),
)
System = Callable[[Tensor, Tensor, Wanted, bool], tuple[Tensor, Tensor | None]]


def log_softmax(
    hidden_U_D: Tensor, weight_V_D: Tensor, selection: Wanted, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The usual way."""
    logs_U_V = F.linear(hidden_U_D, weight_V_D).float().log_softmax(-1)
    logprobs = logs_U_V.gather(1, selection.targets_T[:, None])[:, 0]
    return logprobs, -(logs_U_V.exp() * logs_U_V).sum(-1) if entropy else None


def logsumexp(
    hidden_U_D: Tensor, weight_V_D: Tensor, selection: Wanted, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The other usual way."""
    logits_U_V = F.linear(hidden_U_D, weight_V_D).float()
    normalizer_U = logits_U_V.logsumexp(-1)
    logprobs = logits_U_V.gather(1, selection.targets_T[:, None])[:, 0] - normalizer_U
    if not entropy:
        return logprobs, None
    shares_U_V = (logits_U_V - normalizer_U[:, None]).exp()
    return logprobs, normalizer_U - (shares_U_V * logits_U_V).sum(-1)


def sliced(
    hidden_U_D: Tensor, weight_V_D: Tensor, selection: Wanted, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The trainer's, slice by slice."""
    return logprobs_of_hidden(hidden_U_D, weight_V_D, None, selection, Shape(), entropy=entropy)


SYSTEMS: dict[str, System] = {"log_softmax": log_softmax, "logsumexp": logsumexp, "sliced": sliced}


class Work:
    """Random hidden states and weight of a case, and a pass over them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        """Filled in place, so that memory never stands above what they hold."""
        torch.manual_seed(0)
        kind = getattr(torch, case.dtype)
        self._entropy = case.entropy
        self.hidden = (
            torch.empty(case.tokens, case.width, dtype=kind, device=device)
            .normal_()
            .requires_grad_()
        )
        self.weight = torch.empty(case.vocabulary, case.width, dtype=kind, device=device).normal_(
            std=0.05
        )
        self.weight.requires_grad_()
        rows = torch.arange(case.tokens, device=device)
        self._wanted = Wanted(rows, torch.randint(case.vocabulary, (case.tokens,), device=device))
        self._grads = torch.randn(2, case.tokens, device=device)

    def run(self, system: System) -> Tensor:
        """A forward and backward pass; the log-probabilities."""
        logprobs, entropy = system(self.hidden, self.weight, self._wanted, self._entropy)
        total = (logprobs * self._grads[0]).sum()
        if entropy is not None:
            total = total + (entropy * self._grads[1]).sum()
        torch.autograd.grad(total, [self.hidden, self.weight])
        return logprobs.detach()


def measure_head(
    report: Report,
    cases: tuple[Case, ...] = CASES,
    *,
    threads: int = 1,
    turns: int = 3,
    device: torch.device | None = None,
) -> None:
    """A line of `report` per case and system; see the module. threads: of torch, on a CPU."""
    device = device or torch.device("cpu")
    torch.set_num_threads(threads)
    for case in cases:
        peaks = {name: peak_bytes(case, name, threads, device) for name in SYSTEMS}
        work = Work(case, device)
        seconds_of: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
        gaps: dict[str, float] = {}
        usual = work.run(log_softmax)
        for turn in range(turns):
            for name in list(SYSTEMS)[:: 1 if turn % 2 else -1]:
                seconds, logprobs = _timed(partial(work.run, SYSTEMS[name]), device)
                seconds_of[name].append(seconds)
                gaps[name] = float((logprobs - usual).abs().max())
        for name in SYSTEMS:
            report.add(
                case=case.name,
                system=name,
                **_figures(case, name, seconds_of, peaks),
                gap=gaps[name],
            )
        del work
        clear(device)


def _figures(
    case: Case, name: str, seconds_of: dict[str, list[tuple[float, float]]], peaks: dict[str, int]
) -> dict[str, Figure]:
    pairs = list(zip(seconds_of["log_softmax"], seconds_of[name], strict=True))
    gradient = case.vocabulary * case.width * torch.finfo(getattr(torch, case.dtype)).bits // 8
    return {
        "seconds": statistics.median(wall for wall, _ in seconds_of[name]),
        "cpu_s": statistics.median(cpu for _, cpu in seconds_of[name]),
        "time_ratio": statistics.median(usual[0] / ours[0] for usual, ours in pairs),
        "cpu_ratio": statistics.median(usual[1] / ours[1] for usual, ours in pairs),
        "peak_mib": peaks[name] / 2**20,
        "gradient_mib": gradient / 2**20,
        "peak_share": peaks[name] / peaks["log_softmax"],
        "above_gradient_share": (peaks[name] - gradient) / (peaks["log_softmax"] - gradient),
    }


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[tuple[float, float], Tensor]:
    """Seconds on the clock and of the processor, and what came out."""
    wait(device)
    began, cpu_began = time.perf_counter(), time.process_time()
    output = work()
    wait(device)
    return (time.perf_counter() - began, time.process_time() - cpu_began), output


def peak_bytes(case: Case, system: str, threads: int, device: torch.device) -> int:
    """How far a pass raises memory: measured here on a GPU, else in a process of its own."""
    if device.type == "cuda":
        work = Work(case, device)
        clear(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work.run(SYSTEMS[system])
        return torch.cuda.max_memory_allocated(device) - before
    order = json.dumps({"case": dataclasses.asdict(case), "system": system, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-m", "bench.trainer.head", "--peak", order],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PEAK_TIMEOUT_S,
        check=True,
    )
    return int(done.stdout)


def _peak_here(order_json: str) -> int:
    """The same in this process, which must be fresh; Linux."""
    order = json.loads(order_json)
    torch.set_num_threads(order["threads"])
    work = Work(Case(**order["case"]), torch.device("cpu"))
    small = Work(Case(vocabulary=256, width=64, tokens=32), torch.device("cpu"))
    small.run(SYSTEMS[order["system"]])  # libraries load themselves and their workspaces
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work.run(SYSTEMS[order["system"]])
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most (VmHWM)."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def main(arguments: list[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        print(_peak_here(options.peak))
        return
    device = torch.device(options.device)
    cases: tuple[Case, ...] = CASES
    if device.type == "cuda":
        cases = tuple(
            dataclasses.replace(case, dtype="bfloat16", width=2_048, tokens=8_192)
            for case in CASES[::2]
        )
    report = Report("trainer_head", options.json)
    measure_head(report, cases, threads=options.threads, turns=options.turns, device=device)
    report.show()


if __name__ == "__main__":
    main()
