"""Conversations as token ids: sampled ids are never re-encoded, the world's text is appended."""
