"""Models in GGUF files: found, read, proved, and converted once into a Hugging Face folder; imports
no torch.
"""
