"""What the tests say to OpenAI's SDK: clients, bodies, and the ways to leave a stream."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.engines import Server
from tests.e2e.prompts import TOKENS_OUT

SETTINGS: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": 300}
"""Without retries: what goes wrong must show."""

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "Count the number 1, 2, 3", "max_tokens": 900, "stream": True}
"""A stream that goes on for longer than any test waits, when the end of sequence is ignored."""

WITHOUT_END = {"ignore_eos": True}
"""vLLM's own word for it, which the SDK takes apart from OpenAI's."""


def sync_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **SETTINGS)


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", **SETTINGS)


def chat(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS_OUT, "temperature": 0}


def completion(prompt: str | list[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS_OUT, "temperature": 0}


def text_of(chunk: Any) -> str:
    """The text in one event of a stream, of either kind; the event with the usage has none."""
    return "".join((each.delta.content if hasattr(each, "delta") else each.text) or "" for each in chunk.choices)


# ways to leave a stream that is under way


def leave_by_close(server: Server) -> None:
    with sync_client(server) as client:
        stream = client.completions.create(**ENDLESS, extra_body=WITHOUT_END)
        assert text_of(next(stream))
        assert text_of(next(stream))
        stream.close()


def leave_the_context(server: Server) -> None:
    with sync_client(server) as client, client.completions.create(**ENDLESS, extra_body=WITHOUT_END) as stream:
        assert text_of(next(stream))


def leave_by_cancelling(server: Server) -> None:
    async def main() -> None:
        async with async_client(server) as client:
            seen = asyncio.Event()

            async def read() -> None:
                async for chunk in await client.completions.create(**ENDLESS, extra_body=WITHOUT_END):
                    if text_of(chunk):
                        seen.set()

            task = asyncio.create_task(read())
            waiting = asyncio.create_task(seen.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            assert not task.done(), task
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


# tools


class Weather(pydantic.BaseModel):
    """Arguments of the tool, and the schema of structured output."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: int


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "strict": True, "parameters": Weather.model_json_schema()},
}

CHOICES: dict[str, Any] = {
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "required": "required",
    "auto": "auto",
}


def asking_for_a_tool() -> dict[str, Any]:
    """Two calls as examples, enough for a small model to copy; then a city that the schema does not have."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": %d}}\n</tool_call>'
    messages = [
        {"role": "user", "content": "Weather in Rome for 2 days"},
        {"role": "assistant", "content": call % ("Rome", 2)},
        {"role": "user", "content": "Weather in Oslo for 5 days"},
        {"role": "assistant", "content": call % ("Oslo", 5)},
        {"role": "user", "content": "Weather in Paris for 4 days"},
    ]
    return {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 64, "temperature": 0}
