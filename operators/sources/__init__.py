"""The runtimes of sources: rows read from files and data sets, checked, and issued as prompt
groups.
"""
