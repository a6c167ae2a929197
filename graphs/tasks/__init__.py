"""Tasks a small Llama can learn, as pure functions of text: where prompts come from and what an answer is worth."""
