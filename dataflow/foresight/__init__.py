"""What a placement will cost, before anybody rents it: costs on paper from a model's dimensions and a device's rates."""
