"""One worker process: the loops of its operators, its transports, its line to the scheduler."""
