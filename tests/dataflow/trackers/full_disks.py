"""A run whose tracker's disk is full: python full_disks.py LIBRARY FOLDER POLICY WHEN, in a mount namespace of its own.

The disk is a tmpfs of some MiB at FOLDER/disk, on which only the library writes; something else takes all of it,
`before` the tracker starts or `meanwhile`. Prints what came of it as JSON, and once there is room again tells the
library the rest.
"""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rigs.graphs import tiny_graph  # noqa: E402

from dataflow import Limits, inline, run  # noqa: E402
from dataflow.folder.run_folder import RunFolder  # noqa: E402

MIBIBYTES, STEPS = 24, 40
FILLER = "somebody-elses"


def done(policy: Path, **how: Any) -> RunFolder:
    """A run with the same numbers each time."""
    graph = tiny_graph(policy, max_staleness=0, checkpoint_every=2)
    made = run(graph, on=inline(), quiet=True, **how)
    assert made.verdict.clean, made.verdict.line
    return RunFolder.open(made.folder)


def losses(folder: RunFolder) -> list[float]:
    return [line["loss"] for line in folder.read_metrics() if "loss" in line]


def at_disk(library: str, folder: RunFolder, disk: Path) -> None:
    """Let the library write there, and nowhere else."""
    os.environ |= {
        "TRACKIO_DIR": str(disk / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{disk}/mlflow.db",
        "WANDB_MODE": "offline", "HOME": str(disk), "WANDB_CACHE_DIR": str(disk), "WANDB_DATA_DIR": str(disk),
    }  # fmt: skip
    if library in ("wandb", "tensorboard"):
        (folder.path / library).symlink_to(disk)


def fill(disk: Path) -> None:
    """Take all that is free, to the last byte, and what becomes free."""
    with (disk / FILLER).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error


def fill_once_told(disk: Path, place: Path, over: threading.Event) -> None:
    """Once the tracker has taken some steps in."""
    while not over.is_set():
        try:
            if json.loads(place.read_text())["read"] > 0:
                fill(disk)
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.05)


def main() -> None:
    library, root, policy, when = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    disk = root / "disk"
    disk.mkdir()
    options = f"size={MIBIBYTES}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True, timeout=30)
    plain = losses(done(policy, steps=STEPS, runs=root / "plain"))
    folder = done(policy, steps=2, runs=root / "runs")
    at_disk(library, folder, disk)
    over, place = threading.Event(), folder.path / "trackers" / f"{library}.json"
    filling = threading.Thread(target=fill_once_told, args=(disk, place, over))
    if when == "before":
        fill(disk)
    else:
        filling.start()
    began = time.monotonic()
    folder = done(policy, steps=STEPS, resume=folder.path, track=[library], limits=Limits(track_s=15.0))
    seconds = time.monotonic() - began
    over.set()
    if when != "before":
        filling.join(30)
    said = (folder.logs / "trackers.log").read_text().splitlines()
    free = os.statvfs(disk).f_bavail
    (disk / FILLER).unlink(missing_ok=True)
    rest = subprocess.run(
        [sys.executable, "-m", "dataflow", "track", str(folder.path), "--to", library], cwd=ROOT, capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip
    print(json.dumps({
        "same": losses(folder) == plain, "said": said, "free": free, "seconds": seconds, "rest": rest.returncode,
        "rest_said": rest.stdout + rest.stderr,
        "told": json.loads(place.read_text())["read"] == folder.metrics.stat().st_size,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
