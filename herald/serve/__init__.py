"""The HTTP server: OpenAI's protocol in front of an `AsyncLLM`. Needs the extra ``serve``."""
