"""The generation engine: slots in a KV-cache, attention over them, sampling, stops, admission,
runtime.
"""
