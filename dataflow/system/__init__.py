"""What the operating system gives, as the engine uses it: clocks, files, logs, processes, keys."""
