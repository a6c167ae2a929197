"""What `python -m bench.foresight --fit` has found for each system, on the rows of ../shared/data/calibration."""

from __future__ import annotations

from dataclasses import replace

from dataflow.foresight.rates import ASSUMED

FITTED = {
    system: replace(ASSUMED, memory=memory, compute=compute, source=f"fitted to {rows} published rows of {system}")
    for system, memory, compute, rows in (
        ("LlamaRL", 0.45, 0.89, 6), ("NeMo-RL-0.6", 0.549, 0.126, 6), ("NeMo-RL-0.4", 0.577, 0.316, 3),
        ("verl", 0.05, 0.84, 4),
    )
}  # fmt: skip
