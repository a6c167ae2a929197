"""What `python -m bench.foresight --fit` has found for each system, on the rows of
../shared/data/calibration.
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.foresight.rates import ASSUMED

FITTED = {
    system: replace(
        ASSUMED,
        memory=memory,
        compute=compute,
        source=f"fitted to {rows} published rows of {system}",
    )
    for system, memory, compute, rows in (
        ("LlamaRL", 0.483, 0.227, 6),
        ("NeMo-RL-0.6", 0.548, 0.127, 6),
        ("NeMo-RL-0.4", 0.583, 0.309, 3),
        ("verl", 0.412, 0.767, 4),
    )
}
