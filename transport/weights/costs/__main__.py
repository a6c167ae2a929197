"""Weights on paper: python -m transport.weights.costs --trainer 512 --generator 64x8 --precision
fp8.
"""

import argparse
import sys
from collections.abc import Sequence

from transport.weights.costs.decoder import FAMILIES, NAMED, Decoder
from transport.weights.costs.explain import Interconnect
from transport.weights.costs.on_paper import OnPaper, RankGrid, on_paper
from transport.weights.encoding import QUANTIZED
from transport.weights.errors import LayoutMismatch

GBIT = 1e9 / 8
PRECISIONS = ("bfloat16", "float16", "float32", *QUANTIZED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print who sends what to whom, how long it takes, and what each rank holds at the start."""
    options = _parser().parse_args(arguments)
    quantized = options.precision if options.precision in QUANTIZED else None
    replicas, ranks = options.generator
    links = Interconnect(
        gpus_per_node=options.node,
        between_bytes_per_s=options.link_gbps * GBIT,
        within_bytes_per_s=options.nvlink_gb * 1e9,
    )
    try:
        report: OnPaper = on_paper(
            Decoder.of(options.model),
            RankGrid(
                replicas=options.trainer[0],
                shards=options.trainer[1],
                tensor_parallel=options.trainer_tensor_parallel,
            ),
            RankGrid(replicas=replicas, tensor_parallel=ranks),
            links,
            dtype="bfloat16" if quantized else options.precision,
            quantized=quantized,
        )
        print(report)
        if options.rank is not None:
            print(f"\n{report.rank(options.rank)}")
    except (LayoutMismatch, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m transport.weights.costs", description=main.__doc__
    )
    add = parser.add_argument
    add(
        "--model",
        default="llama-405b",
        help=f"{', '.join(NAMED)}, or a folder with a config.json ({', '.join(FAMILIES)})",
    )
    add(
        "--trainer",
        type=_grid,
        default=(1, 512),
        metavar="[REPLICASx]SHARDS",
        help="512: FSDP over 512 ranks; 8x64: HSDP, 8 replicas of 64",
    )
    add(
        "--trainer-tensor-parallel",
        type=int,
        default=1,
        help="ranks that each of these pieces is cut over",
    )
    add(
        "--generator",
        type=_grid,
        default=(64, 8),
        metavar="[REPLICASx]RANKS",
        help="64x8: 64 replicas of 8 ranks",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="bfloat16",
        help="in which weights travel; int8 and fp8: linear layers, with a scale for each row",
    )
    add("--node", type=int, default=8, help="GPUs of a node")
    add(
        "--link-gbps",
        type=float,
        default=400,
        help="gigabits per second of each GPU to other nodes",
    )
    add(
        "--nvlink-gb",
        type=float,
        default=450,
        help="gigabytes per second of each GPU within its node",
    )
    add("--rank", type=int, help="tell also what this rank of the trainer sends to whom")
    return parser


def _grid(text: str) -> tuple[int, int]:
    """`64x8`, or `8` for `1x8`."""
    first, times, second = text.partition("x")
    counts = (int(first), int(second)) if times else (1, int(first))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


if __name__ == "__main__":
    sys.exit(main())
