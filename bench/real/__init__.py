"""A real model of 135 million parameters: its pace, its parity over staleness, what it forgets."""
