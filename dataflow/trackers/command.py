"""`dataflow track RUN --to wandb`: tells trackers of a run that is over, or of one under way until
it is.
"""

import math
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.errors import GraphError

TURN_S = 0.5


def track_run(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = Path(
        "runs/latest"
    ),
    *,
    to: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    metrics_port: int | None = None,
) -> int:
    """Tell wandb, tensorboard, trackio, mlflow or a tracker of your own what a run's folder says:
    all of a run that is over, from where it was told before; of one under way until it ends, or
    Ctrl-C.

    Args:
        run: the run folder.
        to: which tracker, as --track has it; may be given several times.
        metrics_port: serve the run's figures to Prometheus at this port of this machine, as long as
            it goes on.
    """
    from dataflow.display.formatting import clean
    from dataflow.folder.run_folder import RunFolder
    from dataflow.history.resume import TIMES
    from dataflow.runs.state import RUNNING, state_of
    from dataflow.system.priority import step_back
    from dataflow.trackers.children import TrackersOfRun
    from dataflow.trackers.chosen import LIBRARIES, Wished, choose
    from dataflow.trackers.libraries.prometheus import PrometheusTracker

    folder = RunFolder.open(run)
    wished: list[Wished] = [
        *to,
        *([PrometheusTracker(port=metrics_port)] if metrics_port is not None else []),
    ]
    if not wished:
        raise GraphError(
            "a run is told to somebody, but no tracker was named; give --to"
            f" {' or --to '.join(LIBRARIES)}"
        )
    chosen, has_failed = choose(wished), False
    step_back()
    trackers = TrackersOfRun(folder, chosen, forks=True)
    try:
        while not trackers.is_done:
            if state_of(folder).word != RUNNING:
                outcome = str(folder.read_json("times.json", TIMES).get("outcome", "died"))
                trackers.over(outcome, math.inf)
            for text in trackers.look(TURN_S):
                print(clean(text), flush=True)
                has_failed |= text.startswith("tracker ")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    finally:
        trackers.close()
    return 1 if has_failed and trackers.is_done else 0
