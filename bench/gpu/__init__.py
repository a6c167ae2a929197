"""All that needs an accelerator: tests and measurements, in under nine minutes."""
