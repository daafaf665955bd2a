"""What one ticket cannot carry, on real engines: several answers, scores of the prompt, tokens in and out, usage.

The decode server asked alone, without any ticket, is the one server to compare with; a salt of its own keeps every
request out of the caches of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import BLOCK, events, post

PROMPTS = ["The capital of France is", "Water boils at", "Count: 1, 2, 3, 4,"]


def both(pair: Pair, path: str, body: Mapping[str, Any], salt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the decode server says alone, and what comes through both phases."""
    made = []
    for url, kind in ((pair.decode.url, "alone"), (pair.proxy.url, "handed")):
        salted = f"{salt}-{kind}".replace("/", ".")
        code, _, raw = post(f"{url}{path}", {"model": MODEL, **body, "cache_salt": salted})
        assert code == 200, raw[:2000]
        made.append(json.loads(raw))
    return made[0], made[1]


@pytest.fixture(autouse=True)
def all_handed_over(pair: Pair) -> Iterator[None]:
    """Nothing here may be right only because the decode server computed the prompt itself."""
    before = pair.proxy.metric("baton_prefill_without_ticket_total")
    yield
    assert pair.proxy.metric("baton_prefill_without_ticket_total") == before


def texts(answer: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    return [
        (choice["index"], choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in answer["choices"]
    ]


def streamed(pair: Pair, path: str, body: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, Any]]:
    """The texts of a stream by index, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    code, _, raw = post(f"{pair.proxy.url}{path}", {"model": MODEL, **body, **options})
    assert code == 200, raw[:2000]
    found: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for event in events(raw):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found, usage


GREEDY = {"temperature": 0, "max_tokens": 8}
SEEDED = {"temperature": 0.9, "seed": 11, "max_tokens": 8}
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": ("/v1/completions", {**GREEDY, "prompt": PROMPTS}),
    "samples": ("/v1/completions", {**SEEDED, "prompt": PROMPTS[0], "n": 3}),
    "prompts and samples": ("/v1/completions", {**SEEDED, "prompt": PROMPTS[:2], "n": 2}),
    "chat": ("/v1/chat/completions", {**SEEDED, "messages": [{"role": "user", "content": "A colour?"}], "n": 3}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_answers_are_the_one_servers(pair: Pair, name: str) -> None:
    path, body = SEVERAL[name]
    before = pair.proxy.metric("baton_handed_off_total")
    alone, handed = both(pair, path, body, name)
    assert texts(handed) == texts(alone)
    if "samples" in name or name == "chat":
        assert len({text for _, text, _ in texts(handed)}) > 1
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert handed["usage"][key] == alone["usage"][key]
    found, usage = streamed(pair, path, {**body, "cache_salt": f"{name}-streamed"})
    assert found == {index: text for index, text, _ in texts(alone)}
    assert usage["total_tokens"] == alone["usage"]["total_tokens"]
    assert pair.proxy.metric("baton_handed_off_total") - before == 2 * len(alone["choices"])


def test_lists_of_token_ids_of_different_lengths_are_the_one_servers(pair: Pair) -> None:
    tokens = prompts.text_tokens(pair.decode.url, MODEL)
    lists = [tokens[length : 2 * length] for length in (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5)]
    alone, handed = both(pair, "/v1/completions", {**GREEDY, "prompt": lists}, "ids")
    assert texts(handed) == texts(alone)
    assert handed["usage"]["prompt_tokens"] == sum(map(len, lists))


def scores(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    logprobs = choice["logprobs"]
    rounded = [None if each is None else round(each, 3) for each in logprobs["token_logprobs"]]
    return logprobs["tokens"], logprobs["text_offset"], rounded


@pytest.mark.parametrize("prompt", ["text", "ids", "list"])
def test_an_echo_with_logprobs_is_the_one_servers(pair: Pair, prompt: str) -> None:
    ids = prompts.text_tokens(pair.decode.url, MODEL)[: BLOCK + 3]
    given = {"text": PROMPTS[0], "ids": ids, "list": PROMPTS}[prompt]
    body = {**GREEDY, "prompt": given, "echo": True, "logprobs": 2}
    alone, handed = both(pair, "/v1/completions", body, f"echo-{prompt}")
    assert texts(handed) == texts(alone)
    for ours, theirs in zip(handed["choices"], alone["choices"], strict=True):
        assert scores(ours) == scores(theirs)
        assert len(ours["logprobs"]["top_logprobs"]) == len(theirs["logprobs"]["top_logprobs"])


def test_an_echo_alone_is_the_one_servers(pair: Pair) -> None:
    alone, handed = both(pair, "/v1/completions", {**GREEDY, "prompt": PROMPTS[0], "echo": True}, "plain echo")
    assert texts(handed) == texts(alone)
    found, _ = streamed(pair, "/v1/completions", {**GREEDY, "prompt": PROMPTS[0], "echo": True})
    assert found == {0: texts(alone)[0][1]}


def test_a_prompt_scored_without_generation_is_the_one_servers(pair: Pair) -> None:
    body = {"temperature": 0, "prompt": PROMPTS, "echo": True, "logprobs": 1, "max_tokens": 0}
    alone, handed = both(pair, "/v1/completions", body, "scored")
    assert texts(handed) == texts(alone)
    assert [scores(each) for each in handed["choices"]] == [scores(each) for each in alone["choices"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs_of_the_prompt_are_the_one_servers(pair: Pair, path: str) -> None:
    asked = {"prompt": PROMPTS[0]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    alone, handed = both(pair, path, {**GREEDY, **asked, "prompt_logprobs": 1}, f"prompt {path}")
    assert texts(handed) == texts(alone)

    def of(answer: Mapping[str, Any]) -> list[Any]:
        found = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
        return [each and {token: round(one["logprob"], 3) for token, one in each.items()} for each in found]

    assert of(handed) == of(alone)
    assert len(of(handed)) == handed["usage"]["prompt_tokens"]


@pytest.mark.parametrize("length", [3, BLOCK + 1])
def test_tokens_in_and_out_are_the_one_servers(pair: Pair, length: int) -> None:
    ids = prompts.text_tokens(pair.decode.url, MODEL)[:length]
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    body = {"token_ids": ids, "sampling_params": sampling}
    before = pair.proxy.metric("baton_handed_off_total")
    alone, handed = both(pair, "/inference/v1/generate", body, f"tokens-{length}")
    assert handed["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert len(handed["choices"][0]["token_ids"]) == 6
    code, _, raw = post(
        f"{pair.proxy.url}/inference/v1/generate",
        {"model": MODEL, **body, "stream": True, "cache_salt": f"tokens-{length}-streamed"},
    )
    assert code == 200
    found = [token for event in events(raw) for choice in event["choices"] for token in choice["token_ids"]]
    assert found == alone["choices"][0]["token_ids"]
    assert pair.proxy.metric("baton_handed_off_total") - before == 2


def test_cached_tokens_are_what_prefill_had(pair: Pair) -> None:
    """The first time nothing, the second time what one server says that it had: whole blocks, never all of it."""
    ids = prompts.text_tokens(pair.decode.url, MODEL)[: 3 * BLOCK + 7]
    body = {"model": MODEL, **GREEDY, "prompt": ids}

    def cached(url: str, salt: str, stream: bool) -> int:
        asked = {**body, "cache_salt": salt}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        code, _, raw = post(f"{url}/v1/completions", asked)
        assert code == 200
        answer = [event for event in events(raw) if event.get("usage")][-1] if stream else json.loads(raw)
        return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    alone = [cached(pair.decode.url, "cached-alone", False) for _ in range(2)]
    assert alone == [0, 3 * BLOCK]
    for stream in (False, True):
        assert [cached(pair.proxy.url, f"cached-{stream}", stream) for _ in range(2)] == alone
    for path, asked, place in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 80}]}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "x " * 80, "max_output_tokens": 4}, "input_tokens_details"),
    ):
        one, two = both(pair, path, {"temperature": 0, "max_tokens": 4, **asked}, f"cached {path}")
        again = both(pair, path, {"temperature": 0, "max_tokens": 4, **asked}, f"cached {path}")
        for first, second in ((one, again[0]), (two, again[1])):
            assert ((first["usage"][place] or {}).get("cached_tokens") or 0) == 0
            assert second["usage"][place]["cached_tokens"] >= 2 * BLOCK
        assert again[0]["usage"][place]["cached_tokens"] == again[1]["usage"][place]["cached_tokens"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("stop", {"prompt": "Count: 1, 2, 3, 4,", "stop": ["7"]}),
        ("stop token", {"prompt": "Count: 1, 2, 3, 4,", "stop": [" "]}),
        ("min_tokens", {"prompt": PROMPTS[0], "min_tokens": 4}),
        ("logprobs", {"prompt": PROMPTS[0], "logprobs": 2}),
        ("structure", {"prompt": "A number:", "structured_outputs": {"regex": "[0-9]{3}"}}),
        ("bias", {"prompt": PROMPTS[0], "logit_bias": {"100": 50}}),
        ("one", {"prompt": PROMPTS[0], "max_tokens": 1}),
        ("no cap", {"prompt": PROMPTS[0], "max_tokens": None}),
    ],
)
def test_sampling_fields_mean_what_they_mean_on_one_server(pair: Pair, field: str, body: dict[str, Any]) -> None:
    alone, handed = both(pair, "/v1/completions", {**GREEDY, **body}, field)
    assert texts(handed) == texts(alone)
    if "logprobs" in body:
        assert scores(handed["choices"][0]) == scores(alone["choices"][0])


def test_what_only_the_proxy_may_say_reaches_no_engine(pair: Pair) -> None:
    """Said by a client it would stop an engine or send it to a stranger; here it is as if it had not been said."""
    evil = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]}
    for said in (
        {"kv_transfer_params": evil},
        {"vllm_xargs": {"kv_transfer_params": "text"}},
        {"ec_transfer_params": evil},
    ):
        code, _, raw = post(f"{pair.proxy.url}/v1/completions", {"model": MODEL, **GREEDY, "prompt": "a", **said})
        assert code == 200, raw
    nested = {"max_tokens": 2, "extra_args": {"kv_transfer_params": evil}}
    code, _, raw = post(
        f"{pair.proxy.url}/inference/v1/generate", {"model": MODEL, "token_ids": [1, 2], "sampling_params": nested}
    )
    assert code == 200, raw
