"""The lab behind Baton's own proxy: what no leg alone shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.cluster import TransferMode
from baton.proxy import Proxy, ProxySettings
from baton.sim.text import Sampling, expected, tokens_of
from tests.sim.labs import BLOCK, Bench, bench, until


@contextlib.asynccontextmanager
async def fronted(proxy: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[tuple[Bench, str]]:
    """A lab of 2P2D behind a proxy, and the proxy's URL."""
    async with bench(2, 2, **settings) as made:
        front = Proxy(ProxySettings(host="127.0.0.1", port=0, endpoints=made.lab.endpoints, **(proxy or {})))
        ((_, port),) = await front.start()
        try:
            yield made, f"http://127.0.0.1:{port}"
        finally:
            await front.stop(0.0)


def right(prompt: str) -> str:
    return expected(tokens_of(prompt), Sampling(16, ignore_eos=True), BLOCK).text


async def ask(made: Bench, url: str, prompt: Any, **headers: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    async with made.client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return dict(answer)


@pytest.mark.parametrize("mode", list(TransferMode))
def test_many_at_once_are_all_right_and_leave_nothing(mode: TransferMode) -> None:
    async def go() -> None:
        async with fronted(mode=mode, dp_size=2, max_num_seqs=4, decode_step_seconds=0.0005) as (made, url):
            prompts = [f"prompt {number} " * (number + 1) for number in range(40)]
            answers = await asyncio.gather(*(ask(made, url, prompt) for prompt in prompts))
            assert [answer["choices"][0]["text"] for answer in answers] == [right(prompt) for prompt in prompts]
            await until(lambda: made.lab.idle() and made.lab.ledger.at_rest())
            assert made.states()["given"] == made.states()["pulled"] == 40

    asyncio.run(go())


def test_a_list_of_prompts_and_samples_is_a_lease_each() -> None:
    async def go() -> None:
        async with fronted() as (made, url):
            prompts = ["one prompt", "another prompt that is longer than the one before it", "a third"]
            answer = await ask(made, url, prompts)
            assert [choice["text"] for choice in answer["choices"]] == [right(prompt) for prompt in prompts]
            assert made.states() == {"given": 3, "pulled": 3}

    asyncio.run(go())


def test_a_conversation_goes_on_from_the_turn_before() -> None:
    async def go() -> None:
        async with fronted({"turns": True}, bidirectional=True) as (made, url):
            prompt = "Tell me of the fox that lived in the wood and of all that it saw there in a long year. "
            for turn in range(4):
                answer = await ask(made, url, prompt, **{"x-session-id": "s"})
                text = answer["choices"][0]["text"]
                assert text == right(prompt)
                prompt += f"{text} And then, in year {turn}? "
            # A decode server's turn is pulled by the next prefill server, whose own blocks are pulled again.
            assert made.states() == {"given": 8, "pulled": 7}
            assert [lease.turn for lease in made.lab.ledger.held(turns=True)] == [True]
            assert made.lab.ledger.at_rest()

    asyncio.run(go())
