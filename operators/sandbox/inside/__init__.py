"""What runs inside a sandbox: standard library alone, and as few imports as can be, because each
costs a start.
"""
