"""A browser that tests drive."""
