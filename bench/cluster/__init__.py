"""The first day on eight GPUs, as one command."""
