"""What a run leaves on disk, written so that a crash at any point leaves it readable: each part by
itself.
"""
