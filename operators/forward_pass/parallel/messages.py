"""What the ranks of a forward operator say to each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from dataflow.tokens.sampling_mask import SamplingMask
from operators.ranks.messages import Numbers, codec_of
from operators.ranks.weights import KINDS
from operators.training.learner.packing import TokenTree

# From rank 0


@dataclass(frozen=True)
class Join:
    """Meet the other ranks in this folder."""

    folder: str


@dataclass(frozen=True)
class Compute:
    """Pass a micro-batch through the model."""

    arrays: Mapping[str, Numbers]
    """Those of a `TokenTree`."""
    buckets: tuple[Numbers, ...]
    lengths: tuple[int, ...]
    """Positions of a row in each bucket."""
    left: tuple[Numbers, Numbers] | None
    """Ids and offsets of a `SamplingMask`."""
    wanted: tuple[str, ...]
    temperature: float
    """As `Forward.at` takes it."""

    @classmethod
    def of(
        cls,
        packed: TokenTree,
        left_T: SamplingMask | None,
        wanted: Collection[str],
        temperature: float,
    ) -> Compute:
        """The message of a call of `Forward.computed`."""
        names = [field.name for field in fields(TokenTree) if field.name != "buckets"]
        return cls(
            {name: Numbers.of(getattr(packed, name)) for name in names},
            tuple(Numbers.of(bucket) for bucket in packed.buckets),
            tuple(bucket.shape[1] for bucket in packed.buckets),
            None if left_T is None else (Numbers.of(left_T.ids), Numbers.of(left_T.offsets)),
            tuple(wanted),
            temperature,
        )

    @property
    def given(self) -> tuple[TokenTree, SamplingMask | None, tuple[str, ...]]:
        """The arguments again."""
        buckets = zip(self.buckets, self.lengths, strict=True)
        packed = TokenTree(
            **{name: values.array for name, values in self.arrays.items()},
            buckets=tuple(bucket.array.reshape(-1, length) for bucket, length in buckets),
        )
        left_T = None if self.left is None else SamplingMask(*(each.array for each in self.left))
        return packed, left_T, self.wanted


CODEC = codec_of("forward-ranks", *KINDS, Join, Compute)
