"""1P1D on real vLLM and real NIXL: the text is right, and the KV cache really moved."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import BLOCK, KV_BYTES_A_TOKEN, events, eventually, generate, generate_all, post

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="session")
def cases(pair: Pair) -> list[prompts.Case]:
    made = prompts.cases(pair.decode.url, MODEL)
    assert len(made) >= 50
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_one_servers_uncached(
    pair: Pair, reference: dict[str, str], cases: list[prompts.Case], stream: bool
) -> None:
    """A salt of its own keeps each request out of every cache, on both engines."""
    bodies = {case.name: {**case.body, "stream": stream, "cache_salt": f"{case.name}-{stream}"} for case in cases}
    got = generate_all(pair.proxy.url, bodies)
    assert got == reference
    assert pair.proxy.metric("baton_prefill_without_ticket_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_one_servers_cached(
    pair: Pair, reference: dict[str, str], cases: list[prompts.Case], stream: bool
) -> None:
    """The second time both engines hold prefixes of the prompt already; nothing of that may show."""
    chosen = [case for case in cases if "tokens" in case.name or "chat" in case.name]
    generate_all(pair.proxy.url, {case.name: case.body for case in chosen})
    got = generate_all(pair.proxy.url, {case.name: {**case.body, "stream": stream} for case in chosen})
    assert got == {case.name: reference[case.name] for case in chosen}


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_the_kv_cache_really_moved(pair: Pair, length: int) -> None:
    """D's external hits are the prompt, its bytes what the model's shape gives, and P made one token, discarded."""
    tokens = prompts.text_tokens(pair.decode.url, MODEL)[length : 2 * length]
    blocks = -(-length // BLOCK)

    def counters() -> dict[str, float]:
        return {
            "hits": pair.decode.metric("vllm:external_prefix_cache_hits_total"),
            "bytes": pair.decode.metric("vllm:nixl_bytes_transferred_sum"),
            "made by P": pair.prefill.metric("vllm:generation_tokens_total"),
            "made by D": pair.decode.metric("vllm:generation_tokens_total"),
            "prompt on P": pair.prefill.metric("vllm:prompt_tokens_total"),
        }

    before = counters()
    generate(
        pair.proxy.url,
        {"model": MODEL, "prompt": tokens, "max_tokens": 5, "cache_salt": f"moved-{length}", "ignore_eos": True},
    )
    expected = {
        "hits": float(length),
        "bytes": float(blocks * BLOCK * KV_BYTES_A_TOKEN),
        "made by P": 1.0,
        "made by D": 5.0,
        "prompt on P": float(length),
    }
    got = {
        name: eventually(lambda name=name: counters()[name] - before[name], value)  # type: ignore[misc]
        for name, value in expected.items()
    }
    assert got == expected


def ticket_for(pair: Pair, tokens: list[int], salt: str) -> dict[str, Any]:
    code, _, raw = post(
        f"{pair.prefill.url}/v1/completions",
        {
            "model": MODEL,
            "prompt": tokens,
            "max_tokens": 1,
            "ignore_eos": True,
            "cache_salt": salt,
            "kv_transfer_params": ASK,
        },
    )
    assert code == 200, raw
    ticket: dict[str, Any] = json.loads(raw)["kv_transfer_params"]
    return ticket


@pytest.mark.parametrize("wrong", range(4))
def test_one_wrong_block_changes_the_answer_and_a_foreign_one_is_refused(pair: Pair, wrong: int) -> None:
    """What makes the tests above worth something: with this model a block of another prompt does not go unseen.

    And a ticket in which one block is the same block of another prompt, also pinned on P, is no good: the prefill
    server does not hold that block for this request.
    """
    tokens = prompts.text_tokens(pair.decode.url, MODEL)
    prompt, other = tokens[: 4 * BLOCK], tokens[300 : 300 + 4 * BLOCK]

    def asked(words: Sequence[int], salt: str, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": words, "max_tokens": 24, "ignore_eos": True, "cache_salt": salt}
        return {**body, **more}

    def answer(words: Sequence[int], salt: str) -> str:
        return generate(pair.decode.url, asked(words, salt))

    at = slice(wrong * BLOCK, (wrong + 1) * BLOCK)
    mixed = [*prompt[: at.start], *other[at], *prompt[at.stop :]]
    assert answer(mixed, f"mixed-{wrong}") != answer(prompt, f"right-{wrong}")

    ticket = ticket_for(pair, prompt, f"wrong-{wrong}")
    foreign = ticket_for(pair, other, f"foreign-{wrong}")
    assert len(ticket["remote_block_ids"][0]) == len(foreign["remote_block_ids"][0]) == 4
    ticket["remote_block_ids"][0][wrong] = foreign["remote_block_ids"][0][wrong]
    code, _, raw = post(f"{pair.decode.url}/v1/completions", asked(prompt, f"wrong-{wrong}", kv_transfer_params=ticket))
    assert code == 500, raw


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": MODEL, "prompt": "word " * 2000}, 400),
        ({"model": "no-such-model", "prompt": "a"}, 404),
        ({"model": MODEL, "prompt": "a", "temperature": -1}, 400),
        ({"model": MODEL}, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_comes_back_with_the_engines_own_words(
    pair: Pair, body: dict[str, Any], code: int, stream: bool
) -> None:
    body = {**body, "stream": stream}
    own = post(f"{pair.prefill.url}/v1/completions", {**body, "stream": False, "max_tokens": 1})
    got = post(f"{pair.proxy.url}/v1/completions", body)
    assert got[0] == own[0] == code
    assert json.loads(got[2])["error"]["message"] == json.loads(own[2])["error"]["message"]
    assert generate(pair.proxy.url, {"model": MODEL, "prompt": "still well", "max_tokens": 1})


def test_what_decode_alone_refuses_comes_back_as_it_is(pair: Pair) -> None:
    """The prompt fits and the answer would not: P, capped to one token, takes it, and D refuses."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 5000}
    own = post(f"{pair.decode.url}/v1/completions", body)
    got = post(f"{pair.proxy.url}/v1/completions", {**body, "stream": True})
    assert (got[0], json.loads(got[2])["error"]["message"]) == (400, json.loads(own[2])["error"]["message"])


@pytest.mark.parametrize("count", [1, 2, BLOCK, BLOCK + 1])
def test_exactly_as_many_tokens_as_asked_for(pair: Pair, count: int) -> None:
    body = {"model": MODEL, "prompt": "Count: 1, 2,", "max_tokens": count, "ignore_eos": True, "temperature": 0}
    code, _, raw = post(f"{pair.proxy.url}/v1/completions", body)
    assert (code, json.loads(raw)["usage"]["completion_tokens"]) == (200, count)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    code, headers, raw = post(f"{pair.proxy.url}/v1/completions", streamed)
    assert headers["content-type"].startswith("text/event-stream")
    assert list(events(raw))[-1]["usage"]["completion_tokens"] == count


def test_the_answer_says_who_served_it_and_hides_the_ticket(pair: Pair) -> None:
    _, headers, raw = post(f"{pair.proxy.url}/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    assert (headers["x-baton-prefill"], headers["x-baton-decode"]) == ("P0", "D0")
    assert not json.loads(raw).get("kv_transfer_params")


def test_models_are_listed_under_the_name_that_works(pair: Pair) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{pair.proxy.url}/v1/models", timeout=30) as response:
        assert [each["id"] for each in json.load(response)["data"]] == [MODEL]


def test_an_engine_that_was_stopped_left_no_shared_memory(reference: dict[str, str], left_behind: list[Path]) -> None:
    assert reference
    assert left_behind == []


OTHER_ENDPOINTS = {
    "/v1/responses": ({"input": "Name a colour.", "max_output_tokens": 6}, r'"text": ?"([^"]+)"'),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 6},
        r'"text": ?"([^"]+)"',
    ),
}


@pytest.mark.parametrize("path", OTHER_ENDPOINTS)
def test_responses_and_messages_are_handed_over_too(pair: Pair, path: str) -> None:
    """The same text as the decode server's alone, and a transfer for each; streams arrive as the engine makes them."""
    fields, pattern = OTHER_ENDPOINTS[path]
    body = {"model": MODEL, "temperature": 0, **fields}
    own = post(f"{pair.decode.url}{path}", {**body, "cache_salt": "alone"})[2].decode()
    before = pair.proxy.metric("baton_handed_off_total")
    got = post(f"{pair.proxy.url}{path}", {**body, "cache_salt": "handed"})[2].decode()
    assert re.findall(pattern, got) == re.findall(pattern, own) != []
    code, headers, raw = post(f"{pair.proxy.url}{path}", {**body, "cache_salt": "streamed", "stream": True})
    assert (code, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    deltas = re.findall(r'"(?:delta|text)": ?"([^"]*)"', raw.decode())
    assert re.findall(pattern, own)[0].replace(" ", "") in "".join(deltas).replace(" ", "")
    assert pair.proxy.metric("baton_handed_off_total") - before == 2
    assert pair.proxy.metric("baton_prefill_without_ticket_total") == 0
