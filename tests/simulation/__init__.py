"""A whole run in one process, under a virtual clock and a seeded network, with crashes; laws after
every event.

`python -m tests.simulation --seed N` repeats one seed, with the log of its events.
"""
