"""The shapes in which callers speak: OpenAI's chats, completions and responses, Anthropic's
messages, token ids.
"""
