"""How far predictions of step times are off: against published runs, and against our own."""
