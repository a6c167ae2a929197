"""What is sent where: which rank holds which slice of which tensor, and the copies from one layout
to another.
"""
