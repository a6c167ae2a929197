"""Flags of a program that calls `main(build)`: declared by a function, read from words or a file,
shown in groups.
"""
