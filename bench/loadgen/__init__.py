"""A load generator for LLM servers: what to send, when, over which API, and what came back."""
