"""Tasks that a small Llama can learn, as pure functions of text: prompts, answers and rewards."""

import zlib

# Which prompts of a task are held out of training: a fixed eighth of all, whatever the seed.

SHARE = 8
"""One in so many."""


def is_held_out(key: str) -> bool:
    """Whether what has this key, a prompt or an answer, belongs to evaluation; it is never trained
    on.
    """
    return zlib.crc32(key.encode()) % SHARE == 0
