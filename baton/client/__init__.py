"""The Python client: requests to a router, and an operator's calls.

    from baton.client import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("The morning train", max_tokens=24):
            print(delta.text, end="")

`AsyncClient` has the same methods as coroutines. Owns connections, and nothing of a cluster. Never retries a call: an
error says when another try is worth it. Importing this package imports neither gRPC nor aiohttp.
"""

from baton.client.async_client import AsyncClient
from baton.client.chat_results import ChatAnswer, ChatDelta, ChatToolCall
from baton.client.client import ChatStream, Client, GenerationStream
from baton.client.options import ChatOptions, PinOptions, SamplingOptions
from baton.client.results import Generated, OutputDelta, ScoredToken, Timing, TokenUsage, Work, is_up
from baton.client.streams import AsyncChatStream, AsyncGenerationStream
from baton.client.tls import ClientTls

__all__ = [
    "AsyncChatStream",
    "AsyncClient",
    "AsyncGenerationStream",
    "ChatAnswer",
    "ChatDelta",
    "ChatOptions",
    "ChatStream",
    "ChatToolCall",
    "Client",
    "ClientTls",
    "Generated",
    "GenerationStream",
    "OutputDelta",
    "PinOptions",
    "SamplingOptions",
    "ScoredToken",
    "Timing",
    "TokenUsage",
    "Work",
    "is_up",
]
