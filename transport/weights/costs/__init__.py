"""The cost of a copy plan over a model of the links, as text and pictures; a model's dimensions on
paper.

`python -m transport.weights.costs` tells it of a trainer and a generator; `bench.weight_plane` of
several. No run does.
"""
