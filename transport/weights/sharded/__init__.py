"""The collective executor: n trainer ranks to m ranks of each reader group, each sending its own
bytes only.
"""
