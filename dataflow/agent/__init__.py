"""One host of a run: its forkserver, and the agent that stands between that and a scheduler
elsewhere.
"""
