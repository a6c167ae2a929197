"""Repeats one seed with the log of its events, or looks for a seed that breaks a law.

python -m tests.simulation --seed 17 [--channels]
python -m tests.simulation --seeds 500 20000
python -m tests.simulation --seed 17 --having resume scaling
"""

import argparse
import sys
from typing import Any

from .channels import ChannelWorld
from .laws import Broken
from .shape import FEATURES, HOSTS, SWAPS
from .world import World


def main() -> int:
    """0 when all laws hold."""
    asked = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    asked.add_argument("--seed", type=int, help="repeat this one, with its log")
    asked.add_argument("--seeds", type=int, nargs=2, metavar=("FROM", "TO"), help="try these")
    asked.add_argument("--channels", action="store_true", help="senders and receivers alone")
    asked.add_argument(
        "--having",
        nargs="*",
        choices=[*FEATURES, HOSTS, SWAPS],
        help="instead of what the seed draws",
    )
    wishes = asked.parse_args()
    seeds = range(*wishes.seeds) if wishes.seeds else [wishes.seed or 0]
    more = "" if wishes.having is None else " ".join([" --having", *wishes.having])
    broken = 0
    for seed in seeds:
        world: Any
        if wishes.channels:
            world, more = ChannelWorld(seed, keep_log=wishes.seeds is None), " --channels"
        else:
            world = World(seed, having=wishes.having, keep_log=wishes.seeds is None)
        try:
            world.run()
        except Broken as law:
            broken += 1
            print(
                *(world.log or ()),
                f"seed {seed}: {law}",
                f"python -m tests.simulation --seed {seed}{more}",
                sep="\n",
            )
        else:
            print(*(world.log or ()), sep="\n", end="\n" * bool(world.log))
    print(f"{len(seeds)} seeds, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
