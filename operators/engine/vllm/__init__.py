"""The vLLM back-end: an engine whose forward passes run in vLLM's own process, from its own
environment.
"""
