"""A run of which hosts do not see the scheduler's folder: what it cannot be, what is told, what a
resume needs."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from dataflow.errors import GraphError, RunError
from dataflow.folder.copies.bringing_back import bring_checkpoint
from dataflow.folder.copies.parts import Copies
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.places import HOME
from dataflow.folder.ledger.questions import ListPlaces
from dataflow.folder.ledger.upkeep import SetPlace
from dataflow.folder.run_folder import RunFolder
from dataflow.graph import Graph
from dataflow.node import Generate
from dataflow.planning.hosts import named
from dataflow.planning.plan import Plan
from dataflow.scoring.joining import Join
from dataflow.structure import own_folder, trainers


def check_own_folders(graph: Graph, plan: Plan) -> None:
    """Refuse what cannot be where hosts have folders of their own. Errors: GraphError."""
    own = own_hosts(plan)
    for worker, placement in plan.placements.items():
        if placement.rank_hosts and own.intersection(placement.rank_hosts):
            raise GraphError(
                f"the ranks of '{worker}' are spread over hosts {named(placement.rank_hosts)},"
                f" which write one checkpoint together, but {_see_no_other(own)}; give all of them"
                f" one folder (runs=), or '{worker}' a host that has room for all of its ranks"
            )
    joins = [name for name, operator in graph.operators.items() if isinstance(operator, Join)]
    drawn = {
        host
        for name, op in graph.operators.items()
        if isinstance(op, Generate)
        for host in _hosts(plan, name)
    }
    if joins and own & drawn:
        raise GraphError(
            f"'{joins[0]}' joins branches of one stream, but {_see_no_other(own & drawn)}: rollouts"
            " that are lost with such a host are drawn anew, and one branch could have the old"
            " ones and another the new; give these hosts and the scheduler one folder (runs=), or"
            " have all generators on hosts that see it"
        )


def told_of(graph: Graph, plan: Plan, path: str, copied_to: str) -> str:
    """What the user of such a run is told as it begins; empty where all hosts see the folder.
    copied_to: the address of copies; empty: there is none."""
    own = own_hosts(plan)
    if not own:
        return ""
    kept = {name: host for name in trainers(graph) for host in _hosts(plan, name) if host in own}
    told = (
        f"{_see_no_other(own, path)}: what is made there stays at that path, on a disk of its own"
    )
    if not kept:
        return told
    which = ", ".join(f"'{name}' stays on host '{host}'" for name, host in kept.items())
    left = (
        f"what is copied to {copied_to} survives the loss of that disk"
        if copied_to
        else (
            "nothing that it learns survives the loss of that disk, and no resume elsewhere is"
            " possible without it: give an address for copies (--checkpoint-to) to have one"
        )
    )
    return f"{told}; {which}, and {left}"


def have_checkpoints(
    graph: Graph,
    folder: RunFolder,
    hosts: Collection[str],
    copies: Copies | None,
    told: Callable[[str], object],
) -> None:
    """See that each trainer of a run that goes on can have its newest checkpoint, or an older one,
    and bring one from the address of its copies where that has a newer one. hosts: that are there.
    Errors: RunError where none is to be had that was made; GraphError where the address does not
    answer."""
    if not folder.ledger.exists():
        return
    with Ledger.open(folder.ledger) as ledger:
        for trainer in trainers(graph):
            own, last = own_folder(graph, trainer), ledger.last_step(trainer)
            below = str(folder.checkpoints_of(own).path.relative_to(folder.path))
            rows = ledger.do(ListPlaces(f"{below}/"))
            if not rows:
                continue
            at_home = [
                step
                for step in folder.checkpoints_of(own).steps()
                if f"{below}/step-{step:06d}" not in rows
            ]
            best, newest, who = reachable(rows, at_home, {HOME, *hosts}, last)
            if newest == best:
                continue
            if copies is not None:
                # no whole copy: what is to be said is said below
                with contextlib.suppress(RunError):
                    best = (
                        bring_checkpoint(copies, own or "", folder.path, best, last, told) or best
                    )
                    if (checkpoint := f"{below}/step-{best:06d}") in rows:
                        ledger.do(SetPlace(checkpoint, HOME))
            lost = (
                f"the checkpoint of step {newest} of '{trainer}' is on host {named(who)}, which"
                " takes no part"
            )
            if not best:
                raise RunError(
                    f"'{folder.path.name}' cannot go on: {lost}, and there is no other; have that"
                    " host join with its disk, or start a new run, with an address for copies"
                    " (--checkpoint-to)"
                )
            told(f"{lost}: the run goes on from step {best}")


def reachable(
    rows: Mapping[str, Sequence[str]], at_home: Collection[int], there: Collection[str], last: int
) -> tuple[int, int, list[str]]:
    """Of the checkpoints up to a step: the newest that some who are there have, the newest of all,
    and who has that; 0 where there is none.

    >>> from dataflow.launchers.own_folders import reachable
    >>> reachable({"checkpoints/step-000008": ["c"], "checkpoints/step-000004": ["", "c"]}, [], {"", "a"}, 9)
    (4, 8, ['c'])
    """
    have = {int(path.rpartition("step-")[2]): list(who) for path, who in rows.items()} | {
        step: [HOME] for step in at_home
    }
    known = sorted(step for step in have if step <= last)
    best = max((step for step in known if set(have[step]).intersection(there)), default=0)
    newest = max(known, default=0)
    return best, newest, have.get(newest, [])


def own_hosts(plan: Plan) -> set[str]:
    """Those that do not see the scheduler's folder."""
    return {host.name for host in plan.devices.hosts if host.own_folder}


def _hosts(plan: Plan, node: str) -> tuple[str, ...]:
    """Where a node's worker is."""
    worker = next(worker for worker, nodes in plan.workers.items() if node in nodes)
    return plan.placements[plan.workers[worker][0]].all_hosts


def _see_no_other(hosts: Collection[str], path: str = "") -> str:
    which = f"host{'s' if len(hosts) > 1 else ''} {named(sorted(hosts))}"
    return (
        f"{which} {'do' if len(hosts) > 1 else 'does'} not see the scheduler's run"
        f" folder{path and f' {path}'}"
    )
