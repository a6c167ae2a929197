"""The `dataflow` command: looks at the folders of runs."""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from dataflow.display import Summary, make_view
from dataflow.errors import DataflowError
from dataflow.run_folder import RunFolder
from dataflow.summary import summarize
from dataflow.verify import report, verify

Run = Annotated[Path, tyro.conf.Positional]


def main() -> None:
    """Run the command line; the process ends with its status."""
    status = 0
    try:
        status = tyro.extras.subcommand_cli_from_dict(
            {"verify": check, "show": show}, prog="dataflow", description="Look at the folders of runs."
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


if __name__ == "__main__":
    main()
