"""The page of refusals, docs/refused.md, and what holds it to the code."""
