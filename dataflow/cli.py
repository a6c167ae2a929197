"""The `dataflow` command: looks at the folders of runs, and speaks to a run that is under way."""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from dataflow.command import ask_to_scale
from dataflow.display import Summary, make_view
from dataflow.errors import DataflowError, GraphError
from dataflow.run_folder import RunFolder
from dataflow.summary import summarize
from dataflow.verify import report, verify

Run = Annotated[Path, tyro.conf.Positional]


def main() -> None:
    """Run the command line; the process ends with its status."""
    status = 0
    try:
        status = tyro.extras.subcommand_cli_from_dict(
            {"verify": check, "show": show, "scale": scale},
            prog="dataflow",
            description="Look at the folders of runs, and speak to a run that is under way.",
        )
    except DataflowError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
        status = 2
    sys.exit(status)


def check(run: Run = Path("runs/latest")) -> int:
    """Recompute the ledger's identity from a run folder alone; status 1 when it does not hold.

    Args:
        run: the run folder.
    """
    return report(run)


def show(run: Run = Path("runs/latest")) -> int:
    """Print the summary of a run again.

    Args:
        run: the run folder.
    """
    folder, verdict = RunFolder.open(run), verify(run)
    summary: Summary = summarize(folder, verdict.line, verdict.clean)
    with make_view(sys.stdout) as view:
        view.summary(summary)
    return verdict.exit_status


def scale(run: Run, wishes: Annotated[tuple[str, ...], tyro.conf.Positional]) -> int:
    """Let replicas of a node join or leave a run that is under way; returns once the run has taken the wish in.

    Args:
        run: the run folder, such as runs/latest.
        wishes: how many replicas which node is to have, as in generator=3.
    """
    for node, counts in ask_to_scale(RunFolder.open(run), dict(map(_wish, wishes))).items():
        told = [f"{count} {state}" for state, count in counts.items() if count]
        print(f"{node}: {', '.join(told)}")
    return 0


def _wish(text: str) -> tuple[str, int]:
    node, _, count = text.partition("=")
    if not node or not count.isdigit():
        raise GraphError(f"a wish names a node and a number of replicas, but got {text!r}; write it as generator=3")
    return node, int(count)


if __name__ == "__main__":
    main()
