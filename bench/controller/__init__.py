"""One scheduler with many workers on many hosts: what it costs, and how soon it decides."""
