"""One trainer as several ranks: FSDP2 and tensor parallelism around the learner that one rank
has.
"""
