"""Versions in memory: what a segment is, tensors in a buffer and their checksums, the tensors that
take them over.
"""
