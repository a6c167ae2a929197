"""Moving and checking bytes in C: one pass that copies, casts and sums; the same numbers without a
compiler.
"""

from transport.native.copier import Copier, Summer
from transport.native.sums import Follower, dense_bytes, wordsum, wordsums

__all__ = ["Copier", "Follower", "Summer", "dense_bytes", "wordsum", "wordsums"]
