"""Moving and checking bytes in C: one pass that copies, casts and sums; the same numbers without a
compiler.
"""

from transport.native.copier import Copier
from transport.native.follower import Follower
from transport.native.summer import Summer
from transport.native.sums import dense_bytes, wordsum, wordsums

__all__ = ["Copier", "Follower", "Summer", "dense_bytes", "wordsum", "wordsums"]
