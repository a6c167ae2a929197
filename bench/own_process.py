"""A run of a bench in a process of its own: started with the bench's own module, it writes its
figures into a file.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.chaos.program import Failed, Program

WATCH_S = 0.5
WATCH_SHARE = 0.02
"""Of a core, that watching takes at most: reading the memory of a large process takes long."""


def figures_of(
    module: str,
    names: Sequence[str],
    flags: Sequence[str] = (),
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What `python -m module --child NAMES FILE FLAGS` wrote into FILE as JSON, or {"failed": why
    there is nothing}.

    The child and what it started end with this call, also where this process is told to end
    meanwhile (SIGTERM). environment: the child's whole environment; None: this process's.
    watch: called with the child's process id while it runs, every half second or less often.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, "--child", *names, str(out), *flags]
        before = signal.signal(signal.SIGTERM, _end)
        program = Program(command, Path(folder) / "said", environment)
        deadline = time.monotonic() + timeout_s
        try:
            while watch is not None and not program.is_over and time.monotonic() < deadline:
                began = time.monotonic()
                watch(program.pid)
                time.sleep(max(WATCH_S, (time.monotonic() - began) / WATCH_SHARE))
            program.wait(max(0.1, deadline - time.monotonic()))
            figures: dict[str, Any] = json.loads(out.read_text())
        except Failed as failure:
            return {"failed": str(failure)}
        except OSError as failure:
            return {"failed": f"it ended without figures: {failure}: {program.output_tail()}"}
        finally:
            program.kill()
            signal.signal(signal.SIGTERM, before)
        return figures


def _end(number: int, frame: Any) -> None:
    """As Ctrl-C does, so that what was started is ended."""
    raise SystemExit(128 + number)
