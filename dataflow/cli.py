"""The `dataflow` command: looks at the folders of runs, and speaks to a run that is under way."""

import inspect
import json
import os
import platform
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dataflow.errors import DataflowError, GraphError, nearest, too_long_name
from dataflow.launchers.submit import launch
from dataflow.runs.commands import compare_runs, export_run, list_runs, report_run
from dataflow.system.interrupts import interrupted, status_of
from dataflow.trackers.command import track_run

if TYPE_CHECKING:
    from dataflow.folder.run_folder import RunFolder
    from dataflow.live.steering import Controls

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
LatestRun = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
Trust = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@interrupted()
def main() -> None:
    """Run the command line; the process ends with its status."""
    try:
        status = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 128 + signal.SIGPIPE
    except (DataflowError, OSError) as raised:
        error = too_long_name(raised) if isinstance(raised, OSError) else raised
        if error is None:
            raise
        from rich.markup import escape

        from dataflow.display import say

        say(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", sys.stderr)
        status = 2
    except KeyboardInterrupt as error:
        status = status_of(error)
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    name, *words = arguments or ["--help"]
    commands = {name: command for group in COMMANDS.values() for name, command in group.items()}
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(_versions())
        return 0
    if name not in commands:
        alike = nearest(name, [*commands, "--version", "--help"])
        raise GraphError(
            f"dataflow has no command '{name}'{alike}; give one of those that dataflow --help names"
        )
    if name == "run" and words and not words[0].startswith("-"):
        return run_file(Path(words[0]), tuple(words[1:]))
    status: int = tyro.cli(commands[name], args=words, prog=f"dataflow {name}")
    return status


def _overview() -> str:
    """All commands, each with the first clause of what it says of itself."""
    lines = ["usage: dataflow [--version] COMMAND [RUN] [OPTIONS]", ""]
    width = max(shutil.get_terminal_size().columns, 40)
    for title, group in COMMANDS.items():
        lines.append(title)
        for name, command in group.items():
            says = re.split(r"[:;.](?=\s|$)", inspect.getdoc(command) or "")[0]
            lines += textwrap.wrap(
                says, width, initial_indent=f"  {name:<11} ", subsequent_indent=" " * 14
            )
        lines.append("")
    return "\n".join([*lines, *_ENDING])


def _versions() -> str:
    from dataflow.history.environment import package_versions

    versions = {
        "dataflow-rl": "not installed",
        "python": platform.python_version(),
        **package_versions(),
    }
    packages = ", ".join(
        f"{name} {versions[name]}"
        for name in ("dataflow-rl", "python", "torch")
        if name in versions
    )
    return f"{packages}, from {Path(__file__).parents[1]}"


def run_file(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    flags: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FLAGS]")] = (),
) -> int:
    """Run the program that a YAML or TOML file names, with its flags: graph: graphs.aipo, lr: 1e-6;
    flags go before it.

    A run leaves such a file in its folder: dataflow run runs/latest/config.yaml makes the same run
    again.

    Args:
        file: that file; its key `graph` is the program: a module, or a path to a file of Python.
        flags: of the program, as --steps 100; they go before those of the file.
    """
    from dataflow.flags.config_file import program_of

    program = program_of(file)
    command = [program] if program.endswith(".py") else ["-m", program]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command, "--config", str(file), *flags])


def check(
    run: LatestRun = Path("runs/latest"),
    *,
    deep: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Recompute the ledger's identity from a run folder alone, and see whether its files are as
    they were written; status 1 when not.

    Args:
        run: the run folder.
        deep: read all checkpoints, whatever their size.
    """
    from dataflow.history.verify import report

    return report(run, deep=deep)


def show(run: LatestRun = Path("runs/latest")) -> int:
    """Print the summary of a run again.

    Args:
        run: the run folder.
    """
    from dataflow.display import make_view
    from dataflow.folder.run_folder import RunFolder
    from dataflow.folder.run_hold import seen_in_part
    from dataflow.history.summary import summarize
    from dataflow.history.verify import verify

    folder, verdict = RunFolder.open(run), verify(run)
    summary = summarize(folder, verdict.line, verdict.clean)
    with make_view(sys.stdout) as view:
        view.summary(summary)
    if note := seen_in_part(folder):
        print(f"\n  note: {note}")
    return verdict.exit_status


def _stop(folder: "RunFolder", by: str | None = None) -> str:
    from dataflow.scheduler.requests import ask_to_stop

    ask_to_stop(folder, by=by)
    return f"{folder.path.name} ends after the step under way; dataflow resume goes on with it"


def _scale(folder: "RunFolder", wishes: Mapping[str, int], by: str | None = None) -> str:
    from dataflow.scheduler.requests import ask_to_scale, told_replicas

    return "\n".join(told_replicas(ask_to_scale(folder, wishes, by=by)))


def _controls() -> "Controls":
    """How the page changes a run."""
    from dataflow.live.steering import Controls
    from dataflow.scheduler.requests import ask_for_checkpoint, ask_to_set, ask_to_swap
    from dataflow.settable import read_value

    return Controls(
        stop=_stop,
        scale=_scale,
        swap=lambda folder, node, reference, by: ask_to_swap(folder, node, reference, by=by),
        set_knob=lambda folder, place, value, by: ask_to_set(
            folder, {place: read_value(value)}, by=by
        ),
        checkpoint=lambda folder, by: ask_for_checkpoint(folder, by=by),
    )


def scale(
    run: Run,
    wishes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NODE=COUNT")],
) -> int:
    """Let replicas of a node join or leave a run that is under way; returns once the run has taken
    the wish in.

    Args:
        run: the run folder, such as runs/latest.
        wishes: how many replicas which node is to have, as in generator=3.
    """
    from dataflow.folder.run_folder import RunFolder

    print(_scale(RunFolder.open(run), dict(map(_wish, wishes))))
    return 0


def swap(
    run: Run, wish: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NODE=OPERATOR")]
) -> int:
    """Let another operator take the place of a scorer or filter in a run that is under way;
    generator and trainer stay.

    It is imported and checked first, in a process of its own: what does not fit is refused, and the
    run goes on as it was. What the old one has scored and no step has trained may be scored anew.
    Code of that module runs with the rights of the run.

    Args:
        run: the run folder, such as runs/latest.
        wish: which node, and the operator: reward=rewards:strict by its module and name there,
            reward=path/to/rewards.py:strict by its file; with trl:, say, in front a plain function
            that was written for another system: reward=trl:rewards:accuracy.
    """
    from dataflow.folder.run_folder import RunFolder
    from dataflow.scheduler.requests import ask_to_swap
    from dataflow.scorer import split_form

    node, _, reference = wish.partition("=")
    if not node or not reference:
        raise GraphError(
            f"a swap names a node and an operator, but got {wish!r}; write it as"
            " reward=rewards:strict or reward=path/to/rewards.py:strict, the module or file and"
            " the operator's name there"
        )
    form, place = split_form(reference)
    if place.rpartition(":")[0].endswith(".py"):
        reference = f"{form}{':' if form else ''}{Path(place).absolute()}"
    print(ask_to_swap(RunFolder.open(run), node, reference))
    return 0


def set_knobs(
    run: Run,
    wishes: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NODE.KNOB=VALUE")
    ],
) -> int:
    """Let knobs of a run that is under way have other values: trainer.lr=3e-6 generator.top_p=0.9
    reward.scale=2.

    Each operator says which of its knobs may change, and at which boundary the next value counts;
    what may not is refused, with those that may. Returns once all count. Values are JSON, or a text
    without quotes.

    Args:
        run: the run folder, such as runs/latest.
        wishes: which knob of which node is to have which value.
    """
    from dataflow.folder.run_folder import RunFolder
    from dataflow.scheduler.requests import ask_to_set

    print(ask_to_set(RunFolder.open(run), dict(map(_knob, wishes))))
    return 0


def checkpoint(run: LatestRun = Path("runs/latest")) -> int:
    """Let the trainers of a run that is under way write a checkpoint after the step under way;
    returns then.

    Args:
        run: the run folder.
    """
    from dataflow.folder.run_folder import RunFolder
    from dataflow.scheduler.requests import ask_for_checkpoint

    print(ask_for_checkpoint(RunFolder.open(run)))
    return 0


def stop(run: LatestRun = Path("runs/latest")) -> int:
    """Let a run that is under way finish its step, write a checkpoint and end, as Ctrl-C does where
    it was started.

    Args:
        run: the run folder.
    """
    from dataflow.folder.run_folder import RunFolder
    from dataflow.scheduler.orphans import clear

    folder = RunFolder.open(run)
    if clear(folder):
        print(
            f"{folder.path.name} does not run: it was killed, and what it left in memory is"
            " removed; dataflow resume goes on with it"
        )
        return 0
    print(_stop(folder))
    return 0


def resume(
    run: LatestRun = Path("runs/latest"),
    *,
    steps: int | None = None,
    from_: Annotated[str, tyro.conf.arg(name="from")] = "",
    runs: Path = Path("runs"),
    checkpoint_to: str | None = None,
    trust: Trust = False,
) -> int:
    """Go on with a run that ended early, in its folder: its program is started again, with the
    flags that it had.

    Args:
        run: the run folder.
        from_: go on where that folder is not seen: from the address of the run's copies
            (--checkpoint-to). A folder of its name is made in --runs.
        runs: where that goes.
        checkpoint_to: copy checkpoints to this address from now on; "": nowhere; as it was when
            left out.
        steps: steps to make in all, the ones made before included; as many as it was to make when
            left out.
        trust: run the program that the folder names without a question, though another user owns
            the folder, or it comes from an address.
    """
    from dataflow.folder.copies.process import bring_back
    from dataflow.folder.copies.store import is_own
    from dataflow.folder.run_folder import RunFolder
    from dataflow.history.launch import doubts_of, start_again
    from dataflow.history.resume import RecordedRun

    folder = (
        bring_back(from_, runs, told=lambda text: print(text, flush=True))
        if from_
        else RunFolder.open(run)
    )
    doubts = doubts_of(folder)
    last_step = RecordedRun.read(folder).steps if steps is None else steps
    more = () if last_step is None else ("--steps", str(last_step))
    if checkpoint_to is not None:
        more = (*more, "--checkpoint-to", checkpoint_to)
    origin = "" if not from_ or is_own(from_) else from_
    return start_again(
        folder, *more, "--resume", str(folder.path), trust=trust, origin=origin, doubts=doubts
    )


def replay(
    run: LatestRun = Path("runs/latest"),
    *,
    from_: Annotated[int, tyro.conf.arg(name="from")] = 0,
    to: int | None = None,
    loss: str = "",
    trainer: str = "",
    tolerance: float = 0.0,
    device: str = "cpu",
    out: Path | None = None,
    rollout: int | None = None,
    group: int | None = None,
    source: str | None = None,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    trust: Trust = False,
) -> int:
    """Train a run's recorded rollouts again and compare the losses; or, with --rollout, print one
    of them.

    Status 1 when the losses of the same trainer are not the recorded ones.

    Args:
        run: the run folder.
        from_: step to start from, or the newest checkpoint before it; 0 for the weights that the
            run started from.
        to: last step to train; the run's last when left out.
        loss: train with another loss: a name in operators.losses, module:function, or
            path/to/file.py:function.
        trainer: which one, where there are several.
        tolerance: how far a loss may be off and still count as the same.
        device: where to train, as in cuda:0.
        out: folder for a checkpoint of the result.
        rollout: print the rollout with this id.
        group: that is in this group.
        source: that comes from this source.
        json: print JSON.
        trust: run the program that the folder names without a question, though another user owns
            the folder.
    """
    from rich.console import Console

    from dataflow.folder.run_folder import RunFolder
    from dataflow.history.launch import Wishes, start_again
    from dataflow.history.rollout_view import (
        find_rollout,
        plain_rollout,
        show_rollout,
        vocabulary_of,
    )

    folder = RunFolder.open(run)
    if rollout is not None:
        row_found = find_rollout(folder, rollout, source=source, group_id=group)
        if json:
            print(plain_rollout(row_found))
        else:
            show_rollout(row_found, Console(), vocabulary_of(folder))
        return 0
    wishes = Wishes(
        run=str(folder.path),
        first=from_,
        last=to,
        loss=loss,
        trainer=trainer,
        tolerance=tolerance,
        device=device,
        out=str(out.absolute()) if out else "",
        json=json,
    )
    return start_again(folder, *wishes.as_arguments(), trust=trust)


def doctor(
    run: LatestRun = Path("runs/latest"),
    stacks: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Say who waits for whom in a run, for how long, and what every worker does; or what a run left
    that is over.

    Args:
        run: the run folder.
        stacks: print all frames of all threads.
    """
    from dataflow.doctor.report import examine
    from dataflow.scheduler.requests import ask_for_facts

    print(examine(run, ask_for_facts, all_stacks=stacks), end="")
    return 0


def live(
    runs: Annotated[Runs, tyro.conf.arg(metavar="[RUN ...]")] = (Path("runs/latest"),),
    port: int = 0,
    steer: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Show runs on a page for browsers on this machine: graph, series, rollouts, faults; read-only,
    until Ctrl-C.

    Args:
        runs: run folders: of runs under way or over, or copied from elsewhere.
        port: where to listen; any that is free when left out.
        steer: let whoever has the page's address stop, scale, swap and set; each request is kept in
            requests.jsonl.
    """
    from dataflow.live.command import live as serve_page
    from dataflow.scheduler.requests import ask_for_state

    return serve_page(runs, ask_for_state, port, _controls() if steer else None)


def calibrate(runs: Runs, out: Path = Path("constants.json"), kind: str = "cpu") -> int:
    """Fit the constants of what is foreseen to run folders: python -m graphs.aipo --foresee ..
    --constants FILE.

    Args:
        runs: run folders; some of several model sizes, of synchronous and of asynchronous runs tell
            more apart.
        out: where the constants go.
        kind: the devices of these runs: cpu, or a kind as --foresee has it.
    """
    from dataflow.foresight.calibration import calibrate as fit_runs
    from dataflow.foresight.calibration import described, to_plain
    from dataflow.foresight.seen import look
    from dataflow.system.files import write_atomically

    fitted = fit_runs([look(run) for run in runs], kind)
    text = json.dumps(to_plain(fitted), indent=1)
    write_atomically(out, lambda file: file.write(text.encode()))
    print(described(fitted))
    print(f"wrote {out}; foresee with --constants {out}")
    return 0


def _knob(text: str) -> tuple[str, Any]:
    from dataflow.settable import read_value

    place, _, value = text.partition("=")
    if "." not in place or not value:
        raise GraphError(
            f"a knob is named by its node, but got {text!r}; write it as trainer.lr=3e-6"
        )
    return place.strip(), read_value(value)


def _wish(text: str) -> tuple[str, int]:
    node, _, count = text.partition("=")
    if not node or not count.isdigit():
        raise GraphError(
            f"a wish names a node and a number of replicas, but got {text!r}; write it as"
            " generator=3"
        )
    return node, int(count)


COMMANDS: Mapping[str, Mapping[str, Callable[..., int]]] = {
    "look at runs": {
        "list": list_runs,
        "show": show,
        "live": live,
        "doctor": doctor,
        "verify": check,
        "compare": compare_runs,
        "report": report_run,
        "export": export_run,
        "track": track_run,
    },
    "change a run that is under way": {
        "set": set_knobs,
        "swap": swap,
        "scale": scale,
        "checkpoint": checkpoint,
        "stop": stop,
    },
    "go on with a run, or train it again": {"resume": resume, "replay": replay},
    "begin a run": {"run": run_file, "launch": launch, "calibrate": calibrate},
}
"""By what they are for."""
_ENDING = (
    (
        "RUN is the folder of a run, runs/latest where it is left out. dataflow COMMAND --help says"
        " more."
    ),
    "A run is started by its program, as python -m graphs.sorting.",
)


if __name__ == "__main__":
    main()
