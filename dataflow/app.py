"""`main(build)`: makes a command of a function that builds a graph."""

import contextlib
import inspect
import io
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape

from dataflow.agent.host_program import HOSTED
from dataflow.display import say
from dataflow.errors import DataflowError, GraphError, called_here
from dataflow.folder.run_folder import RunFolder
from dataflow.foresight.command import AUTO, foreseen_of_run, told
from dataflow.foresight.steps import CONSTANTS
from dataflow.graph import Graph
from dataflow.group_bytes import MESSAGE_BYTES
from dataflow.history.launch import Launch, check_flags, check_text, recorded_launch, this_launch
from dataflow.history.replay import Wishes, report_replay
from dataflow.launchers.launcher import Launcher
from dataflow.launchers.named import known_hosts, launcher_named
from dataflow.limits import Limits
from dataflow.model_files import PROMISED
from dataflow.planning.hosts import Devices
from dataflow.run import check_start, inline, make_plan, run
from dataflow.system.interrupts import interrupted, status_of
from dataflow.trackers.chosen import Wished
from dataflow.trackers.libraries.prometheus import PrometheusTracker


@interrupted()
def main(
    build: Callable[..., Graph],
    *,
    steps: int | None = None,
    args: list[str] | None = None,
    limits: Limits | None = None,
) -> None:
    """Run the graph that `build` makes; its keyword arguments become flags, beside those of the run.

    steps: the default of --steps. args: the command line, sys.argv's when None. limits: as `run` has them. Ends the
    process with status 1 when the graph is refused or the run fails, 2 for wrong flags, 130 after Ctrl-C (143 after
    SIGTERM, 129 after SIGHUP) where nothing could end in order.

    >>> from dataflow import Graph, main
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> def build(*, group_size: int = 4) -> Graph:
    ...     g = Graph("tiny")
    ...     FakeTrainer(prompts_per_step=2)(FakeGenerator(group_size=group_size)(g.source(FakePrompts())))
    ...     return g
    >>> main(build, args=["--group-size", "8", "--draw", "tiny.mmd"])
    drew tiny.mmd
    """
    chosen: dict[str, Any] = {}
    command = _command(build, steps, chosen)
    given, wishes = Wishes.split_off(sys.argv[1:] if args is None else args)
    try:
        _parse(command, given, _program(build))
    except SystemExit as ended:
        if ended.code == 2:
            _tell_other_names(command, given)
        raise
    flags = {name: chosen.pop(name) for name in _RUN_FLAGS}
    status = 0
    try:
        check_text()
        if flags["resume"] is not None and (begun := recorded_launch(RunFolder.open(flags["resume"]))) is not None:
            check_flags(begun, chosen)
        launcher = launcher_named(flags["on"]) if flags["on"] else None
        runs = wishes is not None or not (flags["explain"] or flags["draw"] or flags["foresee"])
        promises = PROMISED.set(None if runs else {})
        try:
            graph = build(**chosen)
            if wishes is not None:
                status = report_replay(graph, wishes)
            else:
                _act(graph, flags, launcher, this_launch(chosen) if args is None else None, limits)
        finally:
            PROMISED.reset(promises)
    except DataflowError as error:
        if HOSTED.get(None) is not None:
            raise
        _say(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", error)
        status = 1
    except KeyboardInterrupt as error:
        _say("", error)
        status = status_of(error)
    if status:
        sys.exit(status)


def _parse(command: Callable[..., None], given: Sequence[str], program: str) -> None:
    tyro.cli(command, args=given, prog=program, config=(tyro.conf.OmitArgPrefixes,))


def _tell_other_names(command: Callable[..., None], given: Sequence[str]) -> None:
    """Of flags that another system has: what they are called here."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        _parse(command, ["--help"], "")
    known = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", told.getvalue())}
    for flag in (word.partition("=")[0] for word in given if word.startswith("--")):
        if own := called_here(flag[2:].replace("-", "_"), known):
            say(f"{escape(flag)} is --{own.replace('_', '-')} here", sys.stderr)


def _say(text: str, error: BaseException) -> None:
    """What went wrong, and the notes on it, such as how to go on."""
    say("\n".join(filter(None, (text, *map(escape, getattr(error, "__notes__", ()))))), sys.stderr)


_RUN_FLAGS: dict[str, tuple[Any, Any, str]] = {
    "steps": (int | None, None, "optimiser steps to make; until the prompts end when left out"),
    "seed": (int, 0, "of the prompts' order, sampling and everything else that is random"),
    "gpus": (
        str,
        "",
        "accelerators by node, over all hosts, as in generator=6,trainer=2; with generator=8,trainer=generator they "
        "take turns; shared: all nodes take turns on all accelerators, or in main memory; with --foresee auto and "
        "auto:cost choose devices, parallelism and precision, for the shortest step or the least cost",
    ),
    "replicas": (str, "", "copies of a node on the CPU, as in generator=2"),
    "ranks": (str, "", "processes that share out a trainer's model on the CPU, as in trainer=2"),
    "scale": (str, "", "replicas of a node from a step on, as in 100:generator=3,200:generator=1"),
    "weights": (
        str | None,
        None,
        "executor of the weight plane: shared_memory, cuda_ipc, gloo, nccl; chosen if left out",
    ),
    "listen": (str, "", "address of this machine for edges and control, over tcp with keys; ipc alone if left out"),
    "place": (str, "", "hosts of a node's replicas, in turn, as in generator=a+b,trainer=c; chosen if left out"),
    "link_gbps": (float | None, None, "gigabits per second between machines; slow ones carry what changed alone"),
    "message_bytes": (int, MESSAGE_BYTES, "most bytes of one message on a data edge; a larger group goes in parts"),
    "runs": (Path, Path("runs"), "where the run folder goes"),
    "resume": (Path | None, None, "a run folder in which to go on, with the same flags; or use dataflow resume"),
    "standby": (bool, False, "another process takes the scheduler's place should it die"),
    "keep_steps": (int | None, None, "keep the rollouts of the last steps alone, and what recovery and replay need"),
    "checkpoint_to": (
        str | None,
        None,
        "address or path to which checkpoints are copied, as in s3://bucket/folder; see dataflow resume --from",
    ),
    "track": (
        tyro.conf.UseAppendAction[tuple[str, ...]],
        (),
        "tell the run to wandb, tensorboard, trackio, mlflow or opentelemetry too, or to a tracker of your own, as "
        "my_module:MyTracker; may be given several times",
    ),
    "metrics_port": (int | None, None, "serve the run's figures to Prometheus at this port of this machine alone"),
    "on": (
        str,
        "",
        "hosts: ray, slurm, torchrun, or local:3 for three agents here; this machine if left out",
    ),
    "inline": (bool, False, "one process, one thread, bit-exact"),
    "explain": (bool, False, "print the plan and stop"),
    "foresee": (
        str,
        "",
        "devices that one could rent, as in 16xH100 or 2xcpu, or a run folder to take figures from: print what a step "
        "would take there, and stop; --gpus deals them out, or the shortest step does",
    ),
    "workload": (
        str,
        "",
        "tokens, a scorer's seconds, a filter's share and ways to cut a model that are supposed to exist, to foresee "
        "with, as in mean=800,prompt=200,sigma=0.8,reward.seconds=0.05,reward.drops=0.3,trainer.pipeline=4",
    ),
    "constants": (
        str,
        "",
        "to foresee with: a file that dataflow calibrate wrote, or for a generator data-sheets, serving, kernels",
    ),
    "prices": (str, "", "of a device for an hour, to foresee with, by kind, as in H100=2.5,L40S=1.0"),
    "draw": (
        Path | None,
        None,
        "draw the graph (.svg, .dot, .mmd or .html), or what is foreseen (.svg or .json), and stop",
    ),
    "quiet": (bool, False, "no live view and no summary; what goes wrong is still told, on standard error"),
}


def _act(
    graph: Graph, flags: dict[str, Any], launcher: Launcher | None, launch: Launch | None, limits: Limits | None
) -> None:
    how: dict[str, Any] = {
        "gpus": _devices(flags["gpus"]), "replicas": _counts("replicas", flags["replicas"]),
        "ranks": _counts("ranks", flags["ranks"]),
        "steps": flags["steps"], "scale": _schedule(flags["scale"]), "weights": flags["weights"],
        "listen": flags["listen"], "message_bytes": flags["message_bytes"], "link_gbps": flags["link_gbps"],
        "place": _hosts(flags["place"]),
    }  # fmt: skip
    if flags["foresee"]:
        print(told(
            graph, flags["foresee"], gpus=how["gpus"], replicas=how["replicas"], ranks=how["ranks"],
            workload=flags["workload"], steps=flags["steps"], constants=flags["constants"] or CONSTANTS[0],
            prices=flags["prices"], draw=flags["draw"], place=how["place"],
        ))  # fmt: skip
        return
    if how["gpus"] in AUTO or flags["prices"]:
        found = f"--prices {flags['prices']}" if flags["prices"] else f"--gpus {how['gpus']}"
        raise GraphError(
            f"devices are chosen, and paid, before a run, but {found} comes without --foresee; give --foresee 16xH100, "
            f"say, and run with the flags that it prints"
        )
    on = inline() if flags["inline"] else launcher
    track = _trackers(flags["track"], flags["metrics_port"])
    if flags["explain"]:
        check_start(
            graph, on=on, steps=flags["steps"], seed=flags["seed"], keep_steps=flags["keep_steps"], track=track,
            resume=flags["resume"], listen=flags["listen"], standby=flags["standby"],
        )  # fmt: skip
    if flags["explain"] or flags["draw"]:
        devices = Devices.of(known_hosts(launcher)) if launcher is not None else None
        planned = make_plan(graph, **how, devices=devices, one_process=flags["inline"])
        if flags["explain"]:
            print(planned.explain())
            for source, promise in (PROMISED.get(None) or {}).items():
                print(f"{source} is not there yet: {promise.how} makes it when the run starts")
        if flags["draw"]:
            print(f"drew {graph.draw(flags['draw'], planned)}")
        return
    foreseen = {}
    if flags["constants"] and launcher is None:
        planned = make_plan(graph, **how, one_process=flags["inline"])
        foreseen = foreseen_of_run(graph, planned, flags["workload"], flags["constants"], steps=flags["steps"])
    run(
        graph, **how, on=on, seed=flags["seed"], runs=flags["runs"],
        quiet=flags["quiet"], resume=flags["resume"], foreseen=foreseen,
        standby=flags["standby"], keep_steps=flags["keep_steps"], checkpoint_to=flags["checkpoint_to"], launch=launch,
        limits=limits, track=track,
    )  # fmt: skip


def _trackers(names: tuple[str, ...], port: int | None) -> list[Wished] | None:
    """None: none were named."""
    return [*names, *([PrometheusTracker(port=port)] if port is not None else [])] or None


def _command(build: Callable[..., Graph], steps: int | None, chosen: dict[str, Any]) -> Callable[..., None]:
    """A function with the parameters of `build` and those of the run, that puts what it gets into `chosen`."""
    hints = typing.get_type_hints(build, include_extras=True)
    parameters = []
    for name, parameter in inspect.signature(build).parameters.items():
        if name in _RUN_FLAGS:
            raise GraphError(
                f"'{build.__name__}' has a parameter '{name}', which is a flag of every run; call it otherwise"
            )
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise GraphError(f"'{build.__name__}' takes *{name}, which cannot become a flag; name each parameter")
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, str)))
    for name, (kind, default, text) in _RUN_FLAGS.items():
        annotation: Any = Annotated[kind, tyro.conf.arg(help=text), tyro.conf.FlagCreatePairsOff]
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation,
                default=steps if name == "steps" else default,
            )
        )  # fmt: skip

    def command(**values: Any) -> None:
        chosen.update(values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = build.__doc__ or inspect.getdoc(inspect.getmodule(build)) or "Run a graph."
    command.__name__ = build.__name__
    return command


def _program(build: Callable[..., Graph]) -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name}" if spec is not None and spec.name else Path(sys.argv[0]).name


def _schedule(text: str) -> dict[int, dict[str, int]]:
    """`100:generator=3,200:generator=1` as a mapping of steps to wishes."""
    found: dict[int, dict[str, int]] = {}
    for part in filter(None, text.split(",")):
        step, colon, wish = part.partition(":")
        name, _, count = wish.partition("=")
        if not (colon and step.strip().isdigit() and name.strip() and count.strip().isdigit()):
            raise GraphError(
                f"--scale is {text!r}, which cannot be read at {part!r}; write it as 100:generator=3,200:generator=1"
            )
        found.setdefault(int(step), {})[name.strip()] = int(count)
    return found


def _devices(text: str) -> dict[str, int | str] | str:
    """`generator=6,trainer=generator` as a mapping; `shared`, `auto` and `auto:cost` as they are."""
    return text.strip() if text.strip() in ("shared", *AUTO) else _assignments("gpus", text)


def _counts(flag: str, text: str) -> dict[str, int]:
    """`generator=2` as a mapping."""
    found: dict[str, int] = {}
    for name, value in _assignments(flag, text).items():
        if not isinstance(value, int):
            raise GraphError(f"--{flag} is {text!r}, which cannot be read at {name}={value}; write it as {name}=2")
        found[name] = value
    return found


def _hosts(text: str) -> dict[str, tuple[str, ...]]:
    """`generator=a+b,trainer=c` as a mapping of nodes to hosts; what a host is called may be a number."""
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, text.split(",")):
        name, _, hosts = part.partition("=")
        named = tuple(host.strip() for host in hosts.split("+"))
        if not name.strip() or not all(named) or name.strip() in found:
            raise GraphError(
                f"--place is {text!r}, which cannot be read at {part!r}; write it as generator=a+b,trainer=c, each "
                f"node once"
            )
        found[name.strip()] = named
    return found


def _assignments(flag: str, text: str) -> dict[str, int | str]:
    """`generator=6,trainer=generator` as a mapping."""
    found: dict[str, int | str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise GraphError(
                f"--{flag} is {text!r}, which cannot be read at {part!r}; write it as generator=6,trainer=2"
            )
        found[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return found
