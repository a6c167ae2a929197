"""What a plan of copies costs over a model of the links, told and pictured; a model's dimensions
put on paper.

`python -m transport.weights.costs` tells it of a trainer and a generator; `bench.weight_plane` of
several. No run does.
"""
