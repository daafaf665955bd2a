"""Turns on real engines: the prefill server pulls what it has in common with the last turn, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.engines import Server, events, eventually, post, start, status
from tests.e2e.test_hand_off import ASK
from tests.e2e.topology import BLOCK, MODEL, Cluster, Engine, answer, cluster, pair_proxy, used_kv

KEEPS = Engine(("--bidirectional-kv", "--remote-pull-threshold", "1"))
BRIEF_SECONDS = 12
"""A prefill server takes nothing whose time is up in less than 5 s (vllm 0.32, nixl/pull_worker.py)."""
BRIEF = Engine(
    (
        *KEEPS.flags,
        "--kv-transfer-config",
        json.dumps({"kv_connector_extra_config": {"decoder_kv_blocks_ttl": BRIEF_SECONDS}}),
    )
)
TOKENS_OUT = 12


@pytest.fixture(scope="module")
def whole(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode servers; the second keeps turns for some seconds only."""
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("turns", model, logs, prefill=(KEEPS,), decode=(KEEPS, BRIEF)) as made:
        yield made


@pytest.fixture(scope="module")
def keeping(whole: Cluster, logs: Path) -> Iterator[Cluster]:
    with pair_proxy(whole.prefill[0], whole.decode[0], logs, "--turns") as proxy:
        yield Cluster(whole.prefill, whole.decode[:1], proxy)


@pytest.fixture(scope="module")
def brief(whole: Cluster) -> Cluster:
    """Its proxy knows no turns: each test has one of its own."""
    return Cluster(whole.prefill, whole.decode[1:], whole.proxy)


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 90) for _ in range(count)]


class Chat:
    """One conversation, both legs of each turn sent by hand."""

    def __init__(self, keeping: Cluster) -> None:
        self._prefill, self._decode = keeping.prefill[0], keeping.decode[0]
        self.turn: dict[str, Any] = ASK

    def ask(self, prompt: Sequence[int], *, stream: bool = False, keep: bool = True) -> tuple[str, list[int]]:
        """The answer to *prompt*, as text and in tokens; the turn's ticket is kept for the next one."""
        body = {"model": MODEL, "prompt": list(prompt), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        code, _, raw = post(
            f"{self._prefill.url}/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": self.turn}
        )
        assert code == 200, raw
        ticket = {**json.loads(raw)["kv_transfer_params"], "keep_blocks": keep}
        code, _, raw = post(
            f"{self._decode.url}/v1/completions",
            {**body, "max_tokens": TOKENS_OUT, "stream": stream, "kv_transfer_params": ticket},
        )
        assert code == 200, raw
        chunks = list(events(raw)) if stream else [json.loads(raw)]
        assert [chunk for chunk in chunks[:-1] if "kv_transfer_params" in chunk] == []
        self.turn = chunks[-1].get("kv_transfer_params") or ASK
        choices = [chunk["choices"][0] for chunk in chunks]
        return "".join(each["text"] for each in choices), [token for each in choices for token in each["token_ids"]]


def say(
    proxy: Server, name: str, prompt: Sequence[int], key: str = "", *, stream: bool = False
) -> tuple[str, list[int]]:
    """The answer to one turn of the conversation *name*, as text and in tokens."""
    body = {"model": MODEL, "prompt": list(prompt), "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS_OUT}
    headers = {"X-Session-ID": name, **({"Authorization": f"Bearer {key}"} if key else {})}
    body |= {"stream": stream, "return_token_ids": True}
    code, _, raw = post(f"{proxy.url}/v1/completions", body, headers)
    assert code == 200, raw
    assert b"remote_" not in raw
    assert b"kv_transfer_params" not in raw
    choices = [chunk["choices"][0] for chunk in (events(raw) if stream else [json.loads(raw)])]
    return "".join(each["text"] for each in choices), [token for each in choices for token in each["token_ids"]]


def computed(keeping: Cluster) -> float:
    """Prompt tokens that the prefill server has computed itself."""
    return keeping.prefill[0].metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def gains(read: Callable[[], float], before: float, expected: float) -> bool:
    """Whether a counter comes to be *expected* more than *before*, and not more."""
    return bool(eventually(lambda: read() - before, expected, 30.0) == expected)


def pulled(keeping: Cluster) -> float:
    """Tokens that the prefill server has pulled so far."""
    return keeping.prefill[0].metric("baton_kv_loaded_tokens_total")


def one_servers(keeping: Cluster, prompt: Sequence[int]) -> str:
    return answer(keeping.decode[0].url, prompt, max_tokens=TOKENS_OUT)


@pytest.mark.parametrize("stream", [False, True])
def test_five_turns_pull_what_they_share_and_answer_as_one_server(keeping: Cluster, stream: bool) -> None:
    chat, prompt, shared = Chat(keeping), tokens(70, 1 + stream), 0
    for turn in range(5):
        before, held = pulled(keeping), len(prompt)
        text, made = chat.ask(prompt, stream=stream)
        assert text == one_servers(keeping, prompt)
        assert eventually(lambda before=before: pulled(keeping) - before, shared) == shared  # type: ignore[misc]
        shared = held + TOKENS_OUT - 1  # the last token of an answer has no KV cache yet; all before it has
        prompt = [*prompt, *made, *tokens(20, 100 + turn)]


@pytest.mark.parametrize("stream", [False, True])
def test_five_turns_through_the_proxy(keeping: Cluster, stream: bool) -> None:
    """A conversation by its name. What the prefill server computes is the new part of each prompt, and no more."""
    used = keeping.proxy.metric("baton_turns_used_total")
    prompt, shared = tokens(70, 11 + stream), 0
    for turn in range(5):
        before, worked = pulled(keeping), computed(keeping)
        text, made = say(keeping.proxy, f"talk-{stream}", prompt, stream=stream)
        assert text == one_servers(keeping, prompt)
        assert gains(lambda: pulled(keeping), before, shared)
        assert gains(lambda: computed(keeping), worked, len(prompt) - shared)
        shared = len(prompt) + TOKENS_OUT - 1
        prompt = [*prompt, *made, *tokens(20, 200 + turn)]
    assert keeping.proxy.metric("baton_turns_used_total") - used == 4


@pytest.mark.parametrize("edited", [0, BLOCK, 2 * BLOCK + 5, 3 * BLOCK - 1])
def test_an_edited_history_is_pulled_up_to_the_edit(keeping: Cluster, edited: int) -> None:
    """The stock connector takes the old blocks for the new text and answers with garbage."""
    chat, prompt = Chat(keeping), tokens(4 * BLOCK, 50 + edited)
    _, made = chat.ask(prompt)
    following = [*prompt, *made, *tokens(9, 60)]
    following[edited] = 95
    before = pulled(keeping)
    text, _ = chat.ask(following)
    assert text == one_servers(keeping, following)
    shared = edited // BLOCK * BLOCK
    assert eventually(lambda: pulled(keeping) - before, shared) == shared


def test_a_shortened_history_is_no_harm(keeping: Cluster) -> None:
    """As when a client drops a thought: the next prompt is shorter than what was kept."""
    chat, prompt = Chat(keeping), tokens(4 * BLOCK, 70)
    chat.ask(prompt)
    following = prompt[: 2 * BLOCK + 3]
    text, _ = chat.ask(following)
    assert text == one_servers(keeping, following)


def test_a_turn_that_nobody_wants_holds_nothing(keeping: Cluster) -> None:
    """What earlier tests kept is there still: no block more is."""
    before = used_kv(keeping.decode)
    chat = Chat(keeping)
    chat.ask(tokens(3 * BLOCK, 80), keep=False)
    assert chat.turn == ASK
    assert eventually(lambda: used_kv(keeping.decode), before) == before


def test_a_turn_is_freed_once_it_was_pulled(keeping: Cluster) -> None:
    before = used_kv(keeping.decode)
    chat, prompt = Chat(keeping), tokens(3 * BLOCK, 90)
    _, made = chat.ask(prompt)
    assert eventually(lambda: used_kv(keeping.decode) > before, True)
    chat.ask([*prompt, *made, 33], keep=False)
    assert eventually(lambda: used_kv(keeping.decode), before) == before
    assert eventually(lambda: used_kv(keeping.prefill), 0.0) == 0.0


def test_a_turn_of_a_decode_server_that_is_not_there_is_computed(keeping: Cluster) -> None:
    chat, prompt = Chat(keeping), tokens(3 * BLOCK, 95)
    _, made = chat.ask(prompt, keep=False)
    chat.ask(prompt)
    chat.turn = {**chat.turn, "remote_engine_id": "another", "remote_port": 1}
    following = [*prompt, *made, *tokens(5, 96)]
    text, _ = chat.ask(following, keep=False)
    assert text == one_servers(keeping, following)


def test_a_dropped_thought_is_pulled_up_to_where_it_stood(keeping: Cluster) -> None:
    """As templates do with a model's reasoning: the start of the last answer is not in the next prompt."""
    prompt = tokens(2 * BLOCK + 7, 400)
    _, made = say(keeping.proxy, "thinking", prompt)
    following = [*prompt, *made[5:], *tokens(9, 401)]
    before = pulled(keeping)
    text, _ = say(keeping.proxy, "thinking", following)
    assert text == one_servers(keeping, following)
    assert gains(lambda: pulled(keeping), before, 2 * BLOCK)


def test_two_tenants_with_one_name_for_their_conversation_share_nothing(keeping: Cluster) -> None:
    prompt = tokens(3 * BLOCK, 410)
    _, made = say(keeping.proxy, "ours", prompt, "one")
    following = [*prompt, *made, *tokens(9, 411)]
    before, used = pulled(keeping), keeping.proxy.metric("baton_turns_used_total")
    text, _ = say(keeping.proxy, "ours", following, "other")
    assert text == one_servers(keeping, following)
    assert keeping.proxy.metric("baton_turns_used_total") == used
    text, _ = say(keeping.proxy, "ours", following, "one")
    assert text == one_servers(keeping, following)
    # What was pulled is the first tenant's second turn, and not also the other's.
    assert gains(lambda: pulled(keeping), before, len(prompt) + TOKENS_OUT - 1)


ENDPOINTS: dict[str, Callable[[list[dict[str, str]]], dict[str, Any]]] = {
    "/v1/chat/completions": lambda said: {"messages": said, "max_tokens": TOKENS_OUT},
    "/v1/responses": lambda said: {"input": said, "max_output_tokens": TOKENS_OUT},
    "/v1/messages": lambda said: {"messages": said, "max_tokens": TOKENS_OUT},
}


def streamed(url: str, path: str, said: list[dict[str, str]], headers: Mapping[str, str]) -> str:
    """The text of a stream of any endpoint, which says nothing of the transfer."""
    body = {"model": MODEL, "temperature": 0, "stream": True, **ENDPOINTS[path](said)}
    code, _, raw = post(f"{url}{path}", body, headers)
    assert code == 200, raw
    # Answers of /v1/responses have the key, as null, with or without a hand-off.
    assert re.search(rb'kv_transfer_params"\s*:\s*(?!null)', raw) is None
    assert b"remote_" not in raw
    lines = (line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: {"))
    text = ""
    for event in map(json.loads, lines):
        if path == "/v1/chat/completions":
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
    assert text, raw
    return text


@pytest.mark.parametrize("path", ENDPOINTS)
def test_streams_of_every_endpoint_leave_a_turn_that_the_next_one_uses(keeping: Cluster, path: str) -> None:
    """The ticket is in the last chunk of the decode server's stream: it gets to the proxy and no further."""
    said = [{"role": "user", "content": f"{path} abcdefgh" * 5}]
    kept, used, before = (
        *(keeping.proxy.metric(f"baton_turns_{what}_total") for what in ("kept", "used")),
        pulled(keeping),
    )
    for turn in range(2):
        text = streamed(keeping.proxy.url, path, said, {"X-Session-ID": f"stream of {path}"})
        assert text == streamed(keeping.decode[0].url, path, said, {})
        assert keeping.proxy.metric("baton_turns_kept_total") - kept == turn + 1
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    assert keeping.proxy.metric("baton_turns_used_total") - used == 1
    assert eventually(lambda: pulled(keeping) - before >= BLOCK, True, 30.0)


def test_a_turn_that_the_proxy_let_expire_is_computed_anew(brief: Cluster, logs: Path) -> None:
    """By then the decode server has its blocks back."""
    prompt = tokens(3 * BLOCK + 5, 420)
    with pair_proxy(brief.prefill[0], brief.decode[0], logs, "--turns", "--turn-ttl-seconds", "1") as proxy:
        _, made = say(proxy, "slow", prompt)
        assert eventually(lambda: used_kv(brief.decode) > 0, True)
        assert eventually(lambda: used_kv(brief.decode), 0.0) == 0.0
        following = [*prompt, *made, *tokens(5, 421)]
        before, worked = pulled(brief), computed(brief)
        text, _ = say(proxy, "slow", following)
        assert text == one_servers(brief, following)
        assert gains(lambda: computed(brief), worked, len(following))
        assert pulled(brief) == before
        assert proxy.metric("baton_turns_missed_total", reason="expired") == 1


def test_a_ticket_that_outlived_its_blocks_is_not_pulled_from(brief: Cluster) -> None:
    """Whatever a proxy believes: somebody else's KV cache is in the blocks by now."""
    chat, prompt = Chat(brief), tokens(3 * BLOCK, 430)
    _, made = chat.ask(prompt)
    assert eventually(lambda: used_kv(brief.decode) > 0, True)
    assert eventually(lambda: used_kv(brief.decode), 0.0) == 0.0
    for seed in range(3):
        answer(brief.decode[0].url, tokens(6 * BLOCK, 440 + seed))
    following = [*prompt, *made, *tokens(5, 431)]
    expired = brief.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total")
    text, _ = chat.ask(following, keep=False)
    assert text == one_servers(brief, following)
    assert gains(lambda: brief.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total"), expired, 1)


def test_turns_of_a_decode_server_that_restarted_are_computed_anew(brief: Cluster, logs: Path) -> None:
    """The last test of this file: the server is another afterwards. A client comes back, and so does a stale ticket."""
    (old,) = brief.decode
    chat, prompt = Chat(brief), tokens(3 * BLOCK, 450)
    _, made = chat.ask(prompt)
    following = [*prompt, *made, *tokens(5, 451)]
    with pair_proxy(brief.prefill[0], old, logs, "--turns") as proxy:
        say(proxy, "restarted", prompt)
        old.stop()
        assert eventually(lambda: status(f"{proxy.url}/readiness"), 503) == 503
        again = start(f"{old.name}-again", tuple(map(str, old.process.args)), old.port, logs, {"OMP_NUM_THREADS": "1"})
        try:
            again.wait_healthy()
            assert eventually(lambda: status(f"{proxy.url}/readiness"), 200) == 200
            before = pulled(brief)
            text, _ = say(proxy, "restarted", following)
            assert text == one_servers(brief, following)
            assert proxy.metric("baton_turns_missed_total", reason="engine_restarted") == 1
            text, _ = chat.ask(following, keep=False)
            assert text == one_servers(brief, following)
            assert pulled(brief) == before
        finally:
            again.stop()
