"""The generator on a GPU: attention over pages and drawing in Triton, fused layers, decode steps as
CUDA graphs.
"""
