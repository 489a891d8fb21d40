"""The Serve application: one replica is one pipeline behind an OpenAI-compatible API."""
