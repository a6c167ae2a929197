"""What a placement will cost, on paper, from a model's dimensions and a device's rates."""
