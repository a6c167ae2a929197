"""Which way to place a graph: candidates, a search among them, what would help most."""
