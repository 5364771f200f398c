"""Chats: from messages and tools to a prompt, and from a model's text to content, reasoning and tool calls.

`template_process` renders prompts. The parsers are pure: text goes in as it comes, and deltas come out. `formats` names
them as vLLM does. Nothing here knows an HTTP API.
"""
