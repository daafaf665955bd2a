"""Turns on real engines: the prefill server pulls what it has in common with the last turn, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.engines import events, eventually, post
from tests.e2e.test_hand_off import ASK
from tests.e2e.topology import BLOCK, MODEL, Cluster, Engine, answer, cluster, used_kv

KEEPS = Engine(("--bidirectional-kv", "--remote-pull-threshold", "1"))
TOKENS_OUT = 12


@pytest.fixture(scope="module")
def keeping(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("turns", model, logs, prefill=(KEEPS,), decode=(KEEPS,), proxy=("--turns",)) as made:
        yield made


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
    """A conversation by its name."""
    used = keeping.proxy.metric("baton_turns_used_total")
    prompt, shared = tokens(70, 11 + stream), 0
    for turn in range(5):
        before = pulled(keeping)
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS_OUT}
        code, _, raw = post(
            f"{keeping.proxy.url}/v1/completions",
            {**body, "stream": stream, "return_token_ids": True},
            {"X-Session-ID": f"talk-{stream}"},
        )
        assert code == 200, raw
        assert b"remote_" not in raw
        choices = [chunk["choices"][0] for chunk in (events(raw) if stream else [json.loads(raw)])]
        assert "".join(each["text"] for each in choices) == one_servers(keeping, prompt)
        assert eventually(lambda before=before: pulled(keeping) - before, shared) == shared  # type: ignore[misc]
        shared = len(prompt) + TOKENS_OUT - 1
        prompt = [*prompt, *(token for each in choices for token in each["token_ids"]), *tokens(20, 200 + turn)]
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
