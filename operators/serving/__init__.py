"""An OpenAI-compatible endpoint in front of the engine, which records every call as a rollout (extra `serve`)."""
