"""What a plan of copies costs over a model of the links, told and pictured; `reshard`'s users call it, no run does.

`dataflow.planning` will, when it chooses where trainers and generators sit (foresight); `bench.weight_plane`
does today.
"""
