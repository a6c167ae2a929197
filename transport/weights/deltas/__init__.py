"""Versions as what changed since another one, for slow links; no run reaches it.

`ends.DeltaWriter` and `DeltaReader` take the places of the sharded ends where
`dataflow.worker.ports` is told of a link between hosts that is slower than comparing two versions:
the executor between hosts will open them.
"""
