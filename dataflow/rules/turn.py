"""Which of several nodes that share devices has them."""

from typing import Literal


def decide(*, awake: bool, wants: bool, wanted: bool) -> Literal["take", "give", "stay"]:
    """What a node does about the turn. wants: it has work that needs the devices; wanted: another
    node has.

    Nobody gives the turn up before its work is done, so that memory moves once for each turn; nor
    before another one asks for it, as there may be more work by then.
    """
    if awake:
        return "give" if wanted and not wants else "stay"
    return "take" if wants else "stay"
