"""`dataflow live RUN`: serves the page until Ctrl-C, and lets everything else on the machine go
first."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from dataflow.errors import GraphError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.live.answers import MOST_RUNS, PageAnswers
from dataflow.live.looks import Ask
from dataflow.live.server import PageServer
from dataflow.live.steering import Controls, Steering
from dataflow.system.priority import step_back
from dataflow.system.processes import user_here

TOKEN_BYTES = 24
STEERS = "which whoever has this address may stop and change"


def live(runs: Sequence[Path], ask: Ask, port: int = 0, controls: Controls | None = None) -> int:
    """Serve the page of these runs; returns when it is interrupted. controls: how they are changed;
    None: not at all.

    Errors: RunFolderError where there is no such folder, RunError where the port is taken.
    """
    if len(runs) > MOST_RUNS:
        raise GraphError(
            f"a page shows {MOST_RUNS} runs at most, but {len(runs)} were named; name fewer"
        )
    folders = [RunFolder.open(run) for run in runs]
    step_back()
    by = f"{user_here()}, from the live page"
    answers = PageAnswers(folders, ask, Steering(controls, by) if controls is not None else None)
    steer = answers.steer if controls is not None else None
    server = PageServer(answers, secrets.token_urlsafe(TOKEN_BYTES), steer=steer)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, port, folders, may="read-only" if controls is None else STEERS))
    return 0


async def _serve(
    server: PageServer, port: int, folders: Sequence[RunFolder], may: str = "read-only"
) -> None:
    try:
        await server.start(port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"port {port} of this machine cannot be had: {why}; name another with --port, or none"
        ) from error
    names = ", ".join(folder.path.name for folder in folders)
    print(f"{names}, {may}, for browsers on this machine until Ctrl-C:\n{server.url}", flush=True)
    await server.run()
