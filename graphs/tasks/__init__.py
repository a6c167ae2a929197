"""Tasks that a small Llama can learn, as pure functions of text: prompts, answers and rewards."""
