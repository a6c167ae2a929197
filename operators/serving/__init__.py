"""An endpoint before the engine that speaks OpenAI's and Anthropic's APIs and records every call
(extra `serve`).
"""
