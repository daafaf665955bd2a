"""Clients as people have them, through the proxy, on real engines: OpenAI's SDK, curl, benchmarks.

The right answer is the reference server's, or the decode engine's own when it is asked without the proxy.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e import prompts, sdk
from tests.e2e.clients import curl, curl_words, guidellm, make_venv, posting, run, vllm_bench
from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import Server, events, eventually, post
from tests.e2e.sdk import CHOICES, ENDLESS, USAGE, WITHOUT_END, Weather, chat, completion, text_of

N = prompts.TOKENS_OUT


@pytest.fixture(scope="session")
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with sdk.sync_client(pair.proxy) as made:
        yield made


@pytest.fixture(scope="session")
def engine(pair: Pair) -> Iterator[openai.OpenAI]:
    """The decode engine alone, without the proxy."""
    with sdk.sync_client(pair.decode) as made:
        yield made


def whole_and_streamed(create: Callable[..., Any], body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The answer in one piece and all chunks of a stream with its usage, asked for at once to save time."""
    with ThreadPoolExecutor(2) as pool:
        whole, chunks = pool.submit(create, **body), pool.submit(lambda: list(create(**body, **USAGE)))
        return whole.result(), chunks.result()


def gone(pair: Pair) -> float:
    """Requests whose client left, as the proxy counts them."""
    return pair.proxy.metric("baton_requests_total", status="499")


def unfinished(pair: Pair) -> float:
    """Requests that any engine still works on or keeps waiting."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(server.metric(name) for server in (pair.prefill, pair.decode) for name in names)


def made_by_decode(pair: Pair) -> float:
    """Tokens, as the decode engine counts them."""
    return pair.decode.metric("vllm:generation_tokens_total")


# OpenAI's SDK: text and usage


def test_completions_give_the_right_text_and_usage(
    pair: Pair, client: openai.OpenAI, reference: dict[str, str]
) -> None:
    body = completion(prompts.text_tokens(pair.decode.url, MODEL)[33:66])
    whole, chunks = whole_and_streamed(client.completions.create, body)
    assert whole.choices[0].text == reference["33-tokens"]
    assert "".join(map(text_of, chunks)) == reference["33-tokens"]
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (33, N, 33 + N)


def test_chat_gives_the_right_text_and_usage(
    client: openai.OpenAI, engine: openai.OpenAI, reference: dict[str, str]
) -> None:
    body = chat(prompts.CHATS[1])
    whole, chunks = whole_and_streamed(client.chat.completions.create, body)
    assert whole.choices[0].message.content == reference["chat-1"]
    assert "".join(map(text_of, chunks)) == reference["chat-1"]
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]
    assert chunks[-1].choices == []
    own = engine.chat.completions.create(**body).usage
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (own.prompt_tokens, N)


def test_async_streams_at_once_each_get_their_own_text(pair: Pair, reference: dict[str, str]) -> None:
    async def texts() -> list[str]:
        async with sdk.async_client(pair.proxy) as client:

            async def completed(prompt: str) -> str:
                stream = await client.completions.create(**completion(prompt), **USAGE)
                return "".join([text_of(chunk) async for chunk in stream])

            async def chatted(text: str) -> str:
                stream = await client.chat.completions.create(**chat(text), **USAGE)
                return "".join([text_of(chunk) async for chunk in stream])

            async def whole(text: str) -> str:
                return str((await client.chat.completions.create(**chat(text))).choices[0].message.content)

            return await asyncio.gather(
                *map(completed, prompts.TEXTS[:3]), *map(chatted, prompts.CHATS[:3]), whole(prompts.CHATS[3])
            )

    names = [*(f"text-{index}" for index in range(3)), *(f"chat-{index}" for index in range(4))]
    assert asyncio.run(texts()) == [reference[name] for name in names]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


# its errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 5000}, openai.BadRequestError),  # prefill, capped to one token, would take it
    ],
)
def test_an_engines_refusal_is_the_sdks_error_with_the_engines_words(
    client: openai.OpenAI,
    engine: openai.OpenAI,
    wrong: dict[str, Any],
    error: type[openai.APIStatusError],
    stream: bool,
) -> None:
    body = {**chat("Say hello."), **wrong, "stream": stream}
    with pytest.raises(error) as own:
        engine.chat.completions.create(**body)
    with pytest.raises(error) as got:
        client.chat.completions.create(**body)
    assert got.value.body == own.value.body
    assert isinstance(got.value.body, dict) and got.value.body["message"]


def test_the_proxys_own_refusal_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at least 1") as got:
        client.chat.completions.create(**chat("Say hello."), n=0)
    assert got.value.param == "n"


# a client that leaves


@pytest.mark.parametrize("leave", [sdk.leave_by_close, sdk.leave_the_context, sdk.leave_by_cancelling])
def test_a_client_that_leaves_its_stream_stops_the_engines(
    pair: Pair, client: openai.OpenAI, reference: dict[str, str], leave: Callable[[Server], None]
) -> None:
    before = gone(pair)
    leave(pair.proxy)
    assert eventually(lambda: gone(pair), before + 1) == before + 1
    assert eventually(lambda: unfinished(pair), 0) == 0
    assert client.completions.create(**completion(prompts.TEXTS[1])).choices[0].text == reference["text-1"]


# tools and structured outputs


@pytest.mark.parametrize(("choice", "reason"), [("named", "stop"), ("required", "tool_calls"), ("auto", "tool_calls")])
def test_a_tool_is_called_with_arguments_that_fit_its_schema(client: openai.OpenAI, choice: str, reason: str) -> None:
    body = {**sdk.asking_for_a_tool(), "tool_choice": CHOICES[choice]}
    answer, chunks = whole_and_streamed(client.chat.completions.create, body)
    (whole,) = answer.choices
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert Weather.model_validate_json(call.function.arguments) == Weather(city="Rome", days=4)
    assert whole.finish_reason == reason

    deltas = [delta for chunk in chunks for each in chunk.choices for delta in each.delta.tool_calls or []]
    assert [delta.function.name for delta in deltas if delta.function.name] == ["get_weather"]
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert chunks[-2].choices[0].finish_reason == reason  # the usage comes after it


def test_structured_output_fits_the_schema(client: openai.OpenAI) -> None:
    body = {**chat("What is the weather in Paris for the next 3 days?"), "max_tokens": 64, "response_format": Weather}
    parsed = client.chat.completions.parse(**body).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


# logprobs


def test_completions_give_a_logprob_for_each_token(client: openai.OpenAI, engine: openai.OpenAI) -> None:
    body = {**completion(prompts.TEXTS[0]), "logprobs": 2}
    own, got = (each.completions.create(**body) for each in (engine, client))
    logprobs = got.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == N
    assert "".join(logprobs.tokens) == got.choices[0].text
    assert logprobs.token_logprobs == pytest.approx(own.choices[0].logprobs.token_logprobs, abs=1e-3)


def test_chat_gives_a_logprob_for_each_token(client: openai.OpenAI, engine: openai.OpenAI) -> None:
    body = {**chat(prompts.CHATS[0]), "logprobs": True, "top_logprobs": 2}
    own, got = (each.chat.completions.create(**body) for each in (engine, client))
    entries = got.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * got.usage.completion_tokens
    wanted = [entry.logprob for entry in own.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(wanted, abs=1e-3)
    chunks = client.chat.completions.create(**body, stream=True)
    pieces = [each.logprobs.content for chunk in chunks for each in chunk.choices if each.logprobs]
    assert [entry.token for piece in pieces for entry in piece] == [entry.token for entry in entries]


# responses and messages


def test_responses_are_answered_whole_and_streamed(client: openai.OpenAI, engine: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Name a colour.", "max_output_tokens": N, "temperature": 0}
    own = engine.responses.create(**body).output_text
    whole = client.responses.create(**body)
    assert whole.output_text == own != ""
    assert whole.usage.output_tokens == N
    streamed = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    assert (streamed[0].type, streamed[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in streamed if event.type == "response.output_text.delta") == own
    assert streamed[-1].response.output_text == own


def test_messages_are_answered_whole_and_streamed(pair: Pair) -> None:
    body = chat(prompts.CHATS[0])
    own = json.loads(post(f"{pair.decode.url}/v1/messages", body)[2])
    headers = ["--header", "x-api-key: any", "--header", "anthropic-version: 2023-06-01"]
    got = json.loads(curl(*headers, *posting(body), f"{pair.proxy.url}/v1/messages"))
    for name in ("type", "role", "content", "stop_reason", "usage"):
        assert got[name] == own[name]
    assert got["usage"]["output_tokens"] == N

    raw = curl("--no-buffer", *headers, *posting({**body, "stream": True}), f"{pair.proxy.url}/v1/messages")
    pairs = [event.split("\n") for event in raw.strip().split("\n\n")]
    sent = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert [data["type"] for _, data in sent] == [name for name, _ in sent]
    assert [name for name, _ in sent if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(data["delta"]["text"] for name, data in sent if name == "content_block_delta")
    assert [{"type": "text", "text": text}] == own["content"]


# curl


# --raw shows chunks where they are, and HTTP/1.0 has none
@pytest.mark.parametrize("words", [["--http1.1"], ["--http1.0", "--raw"]], ids=["1.1", "1.0"])
def test_curl_gets_json_and_streams(pair: Pair, reference: dict[str, str], words: list[str]) -> None:
    url, body = f"{pair.proxy.url}/v1/completions", completion(prompts.TEXTS[2])
    whole = curl(*words, *posting(body), url)
    assert json.loads(whole)["choices"][0]["text"] == reference["text-2"]
    raw = curl(*words, "--no-buffer", *posting({**body, "stream": True}), url)
    assert "".join(event["choices"][0]["text"] for event in events(raw.encode())) == reference["text-2"]


def test_curl_sees_the_first_token_long_before_the_last(pair: Pair) -> None:
    before = gone(pair)
    words = ["--no-buffer", *posting({**ENDLESS, **WITHOUT_END}), f"{pair.proxy.url}/v1/completions"]
    with subprocess.Popen(curl_words(*words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("data: {")
        assert eventually(lambda: pair.decode.metric("vllm:num_requests_running"), 1) == 1
        process.terminate()
    assert eventually(lambda: gone(pair), before + 1) == before + 1
    assert eventually(lambda: unfinished(pair), 0) == 0


def test_curl_keeps_its_connection_from_request_to_request(pair: Pair) -> None:
    url = f"{pair.proxy.url}/v1/completions"
    request = ["--write-out", " %{http_code} %{num_connects}\n", "--output", "/dev/null"]
    streamed = posting({**completion("a"), "stream": True})
    answers = curl(*request, *streamed, url, "--next", *request, *posting(completion("a")), url)
    assert answers.split("\n") == [" 200 1", " 200 0", ""]


def test_curl_asks_for_health(pair: Pair) -> None:
    url = f"{pair.proxy.url}/health"
    body = curl(url)
    assert json.loads(body)["status"] == "ok"
    head = run(curl_words("--verbose", "--head", url))
    lines = head.stdout.lower().splitlines()
    assert lines[0] == "http/1.1 200 ok"
    assert f"content-length: {len(body)}" in lines
    assert "Excess found" not in head.stderr  # curl's word for a body after such a head


def test_curl_sends_a_big_body_when_told_to_continue(pair: Pair, reference: dict[str, str], tmp_path: Path) -> None:
    file, answer = tmp_path / "body.json", tmp_path / "answer.json"
    file.write_text(json.dumps({"user": "x" * (2 << 20), **completion(prompts.TEXTS[3])}))
    heads = curl(
        *("--header", "Expect: 100-continue", "--header", "Content-Type: application/json"),
        *("--data-binary", f"@{file}", "--dump-header", "-", "--output", str(answer)),
        f"{pair.proxy.url}/v1/completions",
    )
    assert [line for line in heads.splitlines() if line.startswith("HTTP/")] == [
        "HTTP/1.1 100 Continue",
        "HTTP/1.1 200 OK",
    ]
    assert json.loads(answer.read_text())["choices"][0]["text"] == reference["text-3"]


# benchmarks


def test_vllm_bench_serve_counts_no_failure(pair: Pair, model_path: Path, tmp_path: Path) -> None:
    """Completions and chat at once, each 8 requests of 8 tokens."""
    backends = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
    before = made_by_decode(pair)

    def bench(backend: str) -> dict[str, Any]:
        return vllm_bench(pair.proxy.url, backend, backends[backend], MODEL, model_path, tmp_path / backend)

    with ThreadPoolExecutor(len(backends)) as pool:
        results = dict(zip(backends, pool.map(bench, backends), strict=True))
    for backend, result in results.items():
        assert result["endpoint_type"] == backend
        assert result["errors"] == [""] * 8
        assert (result["completed"], result["failed"], result["output_lens"]) == (8, 0, [8] * 8)
        assert result["total_output_tokens"] == 64
    assert eventually(lambda: made_by_decode(pair) - before, 128) == 128


@pytest.fixture(scope="session")
def clients_venv(request: pytest.FixtureRequest) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first time it takes a minute, and says so
        make_venv()


@pytest.mark.usefixtures("clients_venv")
def test_guidellm_counts_no_error(pair: Pair, model_path: Path, tmp_path: Path) -> None:
    before = made_by_decode(pair)
    (result,) = guidellm(pair.proxy.url, MODEL, model_path, tmp_path)["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert totals == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert [each["output_metrics"]["text_tokens"] for each in result["requests"]["successful"]] == [8] * 4
    assert eventually(lambda: made_by_decode(pair) - before, 32) == 32
