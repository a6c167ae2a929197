"""The runtime of operators that read rollouts with a model: what is due, what is asked, what comes
out.
"""
