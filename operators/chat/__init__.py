"""Conversations as token ids: what was sampled is never encoded again, what the world says is put
behind it.
"""
