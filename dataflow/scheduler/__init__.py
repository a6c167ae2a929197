"""The scheduler at run time: starts workers, watches them, starts them again, ends them."""
