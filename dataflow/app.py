"""`main(build)`: makes a command of a function that builds a graph."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.agent.host_program import HOSTED
from dataflow.errors import DataflowError, GraphError, too_long_name
from dataflow.flags.config_file import read as read_config
from dataflow.flags.config_file import written
from dataflow.flags.declared import ALGORITHM, FIRST, Declared, Flag
from dataflow.flags.run_flags import RUN_FLAGS
from dataflow.flags.words import FlagError, Words, page, split, values_of
from dataflow.folder.run_folder import RunFolder
from dataflow.graph import Graph
from dataflow.history.launch import (
    Launch,
    Wishes,
    check_flags,
    check_text,
    plain_flag,
    recorded_launch,
    this_launch,
)
from dataflow.limits import Limits
from dataflow.model_files import PROMISED
from dataflow.system.interrupts import interrupted, status_of

if TYPE_CHECKING:
    from dataflow.launchers.launcher import Launcher
    from dataflow.trackers.chosen import Wished


@interrupted()
def main(
    build: Callable[..., Graph],
    *,
    steps: int | None = None,
    args: list[str] | None = None,
    limits: Limits | None = None,
) -> None:
    """Run the graph that `build` makes; its keyword arguments become flags, beside those of the
    run.

    steps: the default of --steps. args: the command line, sys.argv's when None. limits: as `run`
    has them. Ends the process with status 1 when the graph is refused or the run fails, 2 for wrong
    flags, 130 after Ctrl-C (143 after SIGTERM, 129 after SIGHUP) where nothing could end in order.

    >>> from dataflow import Graph, main
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> def build(*, group_size: int = 4) -> Graph:
    ...     g = Graph("tiny")
    ...     rollouts = FakeGenerator(group_size=group_size)(g.source(FakePrompts()))
    ...     FakeTrainer(prompts_per_step=2)(rollouts)
    ...     return g
    >>> main(build, args=["--group-size", "8", "--draw", "tiny.mmd"])
    drew tiny.mmd
    """
    declared = Declared.of(build)
    flags_known = all_flags(declared, steps)
    status = 0
    try:
        check_text()
        arguments, wishes = Wishes.split_off(sys.argv[1:] if args is None else args)
        started = this_launch() if args is None else None
        if any(word in ("-h", "--help") for word in arguments):
            _tell(page(_program(), _about(build), flags_known.values()))
            sys.exit(0)
        words = _words(arguments, flags_known, build, started)
        values = values_of(words, flags_known, _called(build), _program())
        flags = {flag.name: values[flag.name] for flag in RUN_FLAGS}
        chosen = {name: values[name] for name in declared.flags}
        if (
            flags["resume"] is not None
            and (begun := recorded_launch(RunFolder.open(flags["resume"]))) is not None
        ):
            check_flags(begun, chosen)
        launch = (
            None
            if started is None
            else replace(
                started,
                arguments=tuple(
                    part
                    for written_words in words.values()
                    for part in written_words.as_arguments()
                ),
                flags={name: plain_flag(value) for name, value in chosen.items()},
                config=written(flags_known.values(), values, words, started.name, started.folder),
            )
        )
        from dataflow.foresight.choice.ways_out import FLAGS
        from dataflow.launchers.named import launcher_named

        launcher = launcher_named(flags["on"]) if flags["on"] else None
        runs = wishes is not None or not (flags["explain"] or flags["draw"] or flags["foresee"])
        promises, names = PROMISED.set(None if runs else {}), FLAGS.set(frozenset(flags_known))
        try:
            graph = build(**declared.arguments(chosen))
            if wishes is not None:
                from dataflow.history.replay import report_replay

                status = report_replay(graph, wishes)
            else:
                _act(graph, flags, launcher, launch, limits)
        finally:
            PROMISED.reset(promises)
            FLAGS.reset(names)
    except DataflowError as error:
        if HOSTED.get(None) is not None:
            raise
        _say(type(error).__name__, str(error), error)
        status = 2 if isinstance(error, FlagError) else 1
    except OSError as error:
        if (refusal := too_long_name(error)) is None or HOSTED.get(None) is not None:
            raise
        _say(type(refusal).__name__, str(refusal), refusal)
        status = 1
    except KeyboardInterrupt as error:
        _say("", "", error)
        status = status_of(error)
    if status:
        sys.exit(status)


def _tell(text: str) -> None:
    """Print to a reader who may stop before the end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def all_flags(declared: Declared, steps: int | None) -> dict[str, Flag]:
    """All flags of a program, in the order of --help. Errors: GraphError for one that the run has,
    too.
    """
    flags = dict(declared.flags)
    for flag in RUN_FLAGS:
        if flag.name in flags:
            raise GraphError(
                f"'{declared.build.__name__}' has a parameter '{flag.name}', which is a flag of"
                " every run; call it otherwise"
            )
        flags[flag.name] = replace(flag, default=steps) if flag.name == "steps" else flag
    order = list(dict.fromkeys([FIRST, ALGORITHM, *(flag.heading for flag in flags.values())]))
    return dict(sorted(flags.items(), key=lambda named: order.index(named[1].heading)))


def _words(
    arguments: Sequence[str],
    flags: Mapping[str, Flag],
    build: Callable[..., Graph],
    started: Launch | None,
) -> dict[str, Words]:
    """The words of each flag: first from the file that --config names, then from the command
    line.
    """
    words = split(arguments, flags, _called(build))
    if (config := words.pop("config", None)) is None:
        return words
    return {
        **read_config(Path(config.value()), flags, started.name if started else "", _called(build)),
        **words,
    }


def _about(build: Callable[..., Graph]) -> str:
    """What a program does, without its flags."""
    text = inspect.getdoc(build) or inspect.getdoc(inspect.getmodule(build)) or "Run a graph."
    return text.partition("\nArgs:\n")[0].strip()


def _say(kind: str, text: str, error: BaseException) -> None:
    """Print an error and its notes, such as how to go on."""
    from rich.markup import escape

    from dataflow.display import say

    lines = [f"[bold red]{kind}[/]: {escape(text)}"] if text else []
    say("\n".join([*lines, *map(escape, getattr(error, "__notes__", ()))]), sys.stderr)


def _act(
    graph: Graph,
    flags: dict[str, Any],
    launcher: "Launcher | None",
    launch: Launch | None,
    limits: Limits | None,
) -> None:
    from dataflow.foresight.command import AUTO, explained, foreseen_of_run, is_devices, told
    from dataflow.foresight.steps import CONSTANTS
    from dataflow.launchers.named import known_hosts
    from dataflow.planning.hosts import Devices
    from dataflow.runner import check_start, inline, make_plan, run

    how: dict[str, Any] = {
        "gpus": _devices(flags["gpus"]),
        "replicas": _counts("replicas", flags["replicas"]),
        "ranks": _counts("ranks", flags["ranks"]),
        "steps": flags["steps"],
        "scale": _schedule(flags["scale"]),
        "weights": flags["weights"],
        "listen": flags["listen"],
        "message_bytes": flags["message_bytes"],
        "link_gbps": flags["link_gbps"],
        "place": _hosts(flags["place"]),
    }
    if (
        flags["explain"]
        and launcher is None
        and (elsewhere := _elsewhere(flags["foresee"], how["gpus"])) is not None
    ):
        plain = {
            name: how[name]
            for name in ("replicas", "ranks", "steps", "scale", "weights", "message_bytes", "place")
        }
        _tell(
            explained(
                graph, elsewhere, gpus=None if is_devices(how["gpus"]) else how["gpus"], **plain
            )
        )
        return
    if flags["foresee"]:
        _tell(
            told(
                graph,
                flags["foresee"],
                gpus=how["gpus"],
                replicas=how["replicas"],
                ranks=how["ranks"],
                workload=flags["workload"],
                steps=flags["steps"],
                constants=flags["constants"] or CONSTANTS[0],
                prices=flags["prices"],
                draw=flags["draw"],
                place=how["place"],
            )
        )
        return
    if is_devices(how["gpus"]):
        raise GraphError(
            f"--gpus {how['gpus']} names devices, but a run has those that are here; write"
            f" generator=6,trainer=2, say, or ask what fits with --foresee {how['gpus']}"
        )
    if how["gpus"] in AUTO or flags["prices"]:
        flag = f"--prices {flags['prices']}" if flags["prices"] else f"--gpus {how['gpus']}"
        raise GraphError(
            f"devices are chosen, and paid, before a run, but {flag} comes without --foresee; give"
            " --foresee 16xH100, say, and run with the flags that it prints"
        )
    on = inline() if flags["inline"] else launcher
    track = _trackers(flags["track"], flags["metrics_port"])
    if flags["explain"]:
        check_start(
            graph,
            on=on,
            steps=flags["steps"],
            seed=flags["seed"],
            keep_steps=flags["keep_steps"],
            track=track,
            resume=flags["resume"],
            listen=flags["listen"],
            standby=flags["standby"],
        )
    if flags["explain"] or flags["draw"]:
        devices = Devices.of(known_hosts(launcher)) if launcher is not None else None
        planned = make_plan(graph, **how, devices=devices, one_process=flags["inline"])
        if flags["explain"]:
            _tell(planned.explain())
            for source, promise in (PROMISED.get(None) or {}).items():
                print(f"{source} is not there yet: {promise.how} makes it when the run starts")
        if flags["draw"]:
            print(f"drew {graph.draw(flags['draw'], planned)}")
        return
    foreseen = {}
    if flags["constants"] and launcher is None:
        planned = make_plan(graph, **how, one_process=flags["inline"])
        foreseen = foreseen_of_run(
            graph, planned, flags["workload"], flags["constants"], steps=flags["steps"]
        )
    run(
        graph,
        **how,
        on=on,
        seed=flags["seed"],
        runs=flags["runs"],
        quiet=flags["quiet"],
        resume=flags["resume"],
        foreseen=foreseen,
        standby=flags["standby"],
        keep_steps=flags["keep_steps"],
        checkpoint_to=flags["checkpoint_to"],
        launch=launch,
        limits=limits,
        track=track,
    )


def _elsewhere(foresee: str, gpus: Any) -> str | None:
    """Devices that a plan is explained on, though they are not here; empty: as many as it wants, of
    no kind. None: it is explained on this machine.
    """
    from dataflow.foresight.command import is_devices
    from dataflow.planning.this_machine import this_machine

    if named := next((wish for wish in (foresee, gpus) if is_devices(wish)), None):
        return str(named)
    count = (
        sum(wish for wish in gpus.values() if isinstance(wish, int))
        if isinstance(gpus, dict)
        else 0
    )
    return "" if count > this_machine().gpus else None


def _trackers(names: tuple[str, ...], port: int | None) -> "list[Wished] | None":
    """None: none were named."""
    from dataflow.trackers.libraries.prometheus import PrometheusTracker

    return [*names, *([PrometheusTracker(port=port)] if port is not None else [])] or None


def _program() -> str:
    """The command that starts it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (
        f"python -m {spec.name}"
        if spec is not None and spec.name
        else f"python {Path(sys.argv[0]).name}"
    )


def _called(build: Callable[..., Graph]) -> str:
    """The program's name in errors: its module."""
    return _program().rpartition(" ")[2] if build.__module__ == "__main__" else build.__module__


def _schedule(text: str) -> dict[int, dict[str, int]]:
    """`100:generator=3,200:generator=1` as a mapping of steps to wishes."""
    schedule: dict[int, dict[str, int]] = {}
    for part in filter(None, text.split(",")):
        step, colon, wish = part.partition(":")
        name, _, count = wish.partition("=")
        if not (colon and step.strip().isdigit() and name.strip() and count.strip().isdigit()):
            raise GraphError(
                f"--scale is {text!r}, which cannot be read at {part!r}; write it as"
                " 100:generator=3,200:generator=1"
            )
        schedule.setdefault(int(step), {})[name.strip()] = int(count)
    return schedule


def _devices(text: str) -> dict[str, int | str] | str:
    """`generator=6,trainer=generator` as a mapping; `shared`, `auto` and `auto:cost` as they
    are.
    """
    from dataflow.foresight.command import AUTO, is_devices

    return (
        text.strip()
        if text.strip() in ("shared", *AUTO) or is_devices(text)
        else _assignments("gpus", text)
    )


def _counts(flag: str, text: str) -> dict[str, int]:
    """`generator=2` as a mapping."""
    counts: dict[str, int] = {}
    for name, value in _assignments(flag, text).items():
        if not isinstance(value, int):
            raise GraphError(
                f"--{flag} is {text!r}, which cannot be read at {name}={value}; write it as"
                f" {name}=2"
            )
        counts[name] = value
    return counts


def _hosts(text: str) -> dict[str, tuple[str, ...]]:
    """`generator=a+b,trainer=c` as a mapping of nodes to hosts; what a host is called may be a
    number.
    """
    hosts_of_node: dict[str, tuple[str, ...]] = {}
    for part in filter(None, text.split(",")):
        name, _, hosts = part.partition("=")
        named = tuple(host.strip() for host in hosts.split("+"))
        if not name.strip() or not all(named) or name.strip() in hosts_of_node:
            raise GraphError(
                f"--place is {text!r}, which cannot be read at {part!r}; write it as"
                " generator=a+b,trainer=c, each node once"
            )
        hosts_of_node[name.strip()] = named
    return hosts_of_node


def _assignments(flag: str, text: str) -> dict[str, int | str]:
    """`generator=6,trainer=generator` as a mapping."""
    assigned: dict[str, int | str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise GraphError(
                f"--{flag} is {text!r}, which cannot be read at {part!r}; write it as"
                " generator=6,trainer=2"
            )
        assigned[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return assigned
