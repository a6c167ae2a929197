"""What is wrong with a run: who waits for whom, what each worker does, and when nothing moves at
all.

`waiting` and `verdict` go from facts to sentences, `stall` from reports to a decision: pure, tested
with plain values. `gather` and `processes` collect the facts; `report` writes them down; `attend`
sits in the scheduler, `examine` is the command.
"""
