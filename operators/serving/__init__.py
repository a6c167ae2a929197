"""An endpoint in front of the engine that speaks OpenAI's and Anthropic's APIs, and records every call as a rollout (extra `serve`)."""
