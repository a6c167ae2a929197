"""How scorers run: values in and out, and processes that can be killed."""
