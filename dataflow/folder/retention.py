"""How long a run keeps the rollouts of its steps: which may be removed, how, and how a reader
knows.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dataflow.folder.ledger import BaseLedger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError

FACT = "rollouts_not_kept"
"""Key of a ledger fact, by node: /<node>, the last step whose file may be gone."""
KNOB = "keep_steps (--keep-steps)"
"""Text for the user."""


def removable(
    *, last: int, checkpoint: int, keep_steps: int, staying: Iterable[int] | None = None
) -> int:
    """The last step whose rollouts nothing needs any more; 0: all are needed.

    last: step that is committed. checkpoint: step of the newest that is; recovery trains what comes
    after it. keep_steps: the last so many stay. staying: steps of the checkpoints that stay, where
    such are asked for: a replay of the last steps begins with one of them, and needs what comes
    after it; None: there are none.
    """
    limit = max(0, min(checkpoint, last - keep_steps))
    return limit if staying is None else max((step for step in staying if step <= limit), default=0)


def surplus(
    *, staying: Iterable[int], every: int, most: int, last: int, keep_steps: int | None
) -> list[int]:
    """Steps of those checkpoints that may go where so many are to stay: of the multiples of `every`
    all but the newest.

    staying: those that stay by themselves. last, keep_steps: as `removable` has them. The one that
    a replay of the last steps begins with is none of those that go, nor the next one, which it will
    begin with: without that no rollouts could ever be removed.
    """
    steps = sorted(staying)
    old = [step for step in steps if step % every == 0][:-most]
    if keep_steps is None:
        return old
    first = max((step for step in steps if step <= last - keep_steps), default=0)
    after = min(step for step in steps if step > first) if steps and steps[-1] > first else first
    return [step for step in old if step not in (first, after)]


def remove(
    folder: RunFolder,
    ledger: BaseLedger,
    node: str,
    upto: int,
    *,
    kind: str,
    log: Any,
    own: str | None = None,
) -> None:
    """Remove the files of a node's steps up to `upto`, once the ledger knows on the disk itself
    that they may be gone.

    kind: step | eval. own: the node's folder. A crash on the way leaves files that nobody looks
    for; the next call takes them. What the disk refuses is a warning.
    """
    if upto < 1:
        return
    try:
        if upto > gone(ledger, node):
            ledger.set_facts({f"{FACT}/{node}": upto})
            ledger.flush()
        for step, path in folder.rollouts_of(own).files(kind):
            if step <= upto:
                folder.extras.remove(path)
    except (RunFolderError, LedgerError) as error:
        log.warning("rollouts not removed", node=node, error=str(error))


def gone(ledger: BaseLedger, node: str) -> int:
    """The last step of a node whose rollouts may have been removed; 0: none was."""
    return not_kept(ledger.facts()).get(node, 0)


def not_kept(facts: Mapping[str, Any]) -> dict[str, int]:
    """The same by node, from the facts in a ledger."""
    return {
        name.removeprefix(f"{FACT}/"): step
        for name, step in facts.items()
        if name.startswith(f"{FACT}/")
    }
