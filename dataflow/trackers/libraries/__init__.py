"""Trackers of well-known libraries, a file each; a library is imported in its tracker's process
alone.
"""
