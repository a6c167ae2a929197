"""The live page: what it costs a run, how large a run it shows, and the pictures of the README."""
