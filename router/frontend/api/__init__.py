"""The HTTP doors: OpenAI's and vLLM's requests in, JSON and server-sent events out.

Owns the shapes of each API. Never knows workers, pages or placement: it starts requests with `GenerationService`.
"""
