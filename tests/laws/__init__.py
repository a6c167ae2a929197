"""The laws of the design as a list: which test states each, and which code keeps it, so that it can
be tried without.

`python -m tests.laws` breaks one law after the other in a copy of the tree and says whether its
test noticed.
"""
