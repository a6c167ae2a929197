"""Why a row ended, as the engine's codes; imports nothing, so that a server can read them without
torch.
"""

STOPPED, TOO_LONG, BROKEN, ABORTED = 0, 1, 2, 3
"""An end token or stop string, its length limit, logits that are not finite, the caller's wish."""
