"""Not connected to a run yet: how long a plan takes by a model of the links, and its picture."""
