"""Where the seconds of a generator's steps come from: rates of data sheets, measured servers, or
measured kernels."""

from __future__ import annotations

from typing import Protocol

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Decoder, counts
from dataflow.foresight.kernels import Kernels
from dataflow.foresight.serving import Serving, WeightFormat

CONSTANTS = ("data-sheets", "serving", "kernels")
"""The last needs an optional package, of which the second was fitted to rows."""


class ReplicaTimes(Protocol):
    """Of one replica."""

    def decode(self, batch: float, seen: float) -> float:
        """Seconds of one token for each of a batch, which look back at `seen` tokens each, in the
        mean."""

    def prompt(self, tokens: float) -> float:
        """Seconds of the prompt of one rollout among others."""

    @property
    def source(self) -> str:
        """In words; says what is extrapolated of all that was asked so far."""


def steps_of(
    constants: str, decoder: Decoder, kind: DeviceKind, *, ranks: int, dtype: str
) -> ReplicaTimes | None:
    """None: by `Rates`. `kernels:0.24.0` are those of one version of vLLM.

    GraphError where the constants have another name, or do not cover this replica."""
    name, colon, server = constants.partition(":")
    if name not in CONSTANTS or (colon and (name != "kernels" or not server)):
        raise GraphError(
            f"constants to foresee with are {constants!r}; take one of {', '.join(CONSTANTS)},"
            " kernels:VERSION of vLLM"
        )
    if name == "kernels":
        return Kernels(
            decoder=decoder, kind=kind, ranks=ranks, products=dtype, server=server or None
        )
    if name == "serving":
        return Serving(
            model=counts(decoder),
            form=WeightFormat(dense=dtype, experts=dtype),
            kind=kind,
            ranks=ranks,
        )
    return None


def check_covered(constants: str, decoder: Decoder, kind: DeviceKind, dtype: str) -> None:
    """GraphError for what no number of ranks can mend: a name, a package, a device, a dtype."""
    made = steps_of(constants, decoder, kind, ranks=1, dtype=dtype)
    if made is not None:
        made.decode(1, 1)
