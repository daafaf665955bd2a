"""Fake engines over real sockets: tickets, leases, POISON, queues, turns, ranks, restarts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from baton.cluster import TransferMode
from baton.sim.check_cases import BODIES, leg
from baton.sim.requests import PATHS, RESPONSES
from tests.sim.labs import PROMPT, Bench, bench, right, until, with_bench

VLLM_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
}


def test_a_hand_over_gives_the_one_servers_text_and_leaves_nothing() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        assert set(ticket) == VLLM_KEYS
        assert not bench.lab.ledger.at_rest()
        status, answer = await bench.decode(ticket)
        assert (status, answer["choices"][0]["text"]) == (200, right())
        assert bench.states() == {"given": 1, "pulled": 1}
        assert bench.lab.ledger.at_rest()
        assert [rank.pool.used for engine in bench.lab.engines.values() for rank in engine.ranks] == [0, 0]

    with_bench(test)


def test_a_lease_that_expired_before_the_pull_is_poison_and_a_wrong_text() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        await until(lambda: bench.states().get("expired") == 1)
        status, answer = await bench.decode(ticket)
        assert status == 200
        assert answer["choices"][0]["text"] != right()
        assert [each.why for each in bench.lab.ledger.poison] == ["no lease: it has ended or never was"]
        assert not bench.lab.ledger.at_rest()

    with_bench(test, lease_seconds=0.05)


def test_a_ticket_used_twice_is_poison() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        await bench.decode(ticket)
        _, answer = await bench.decode(ticket)
        assert answer["choices"][0]["text"] != right()
        assert len(bench.lab.ledger.poison) == 1

    with_bench(test)


def test_blocks_of_another_request_are_poison_and_a_wrong_text() -> None:
    async def test(bench: Bench) -> None:
        mine, other = await bench.prefill(request_id="a"), await bench.prefill(prompt=PROMPT[::-1], request_id="b")
        mine["remote_block_ids"] = other["remote_block_ids"]
        _, answer = await bench.decode(mine)
        assert answer["choices"][0]["text"] != right()
        assert "foreign" in bench.lab.ledger.poison[0].why

    with_bench(test)


def test_a_ticket_of_an_engine_that_is_no_more_fails_that_request_alone() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        port, name = bench.lab.engines["P0"].port, bench.lab.engines["P0"].engine_id
        await bench.lab.engines["P0"].restart()
        assert bench.lab.engines["P0"].port == port
        assert bench.lab.engines["P0"].engine_id != name
        status, answer = await bench.decode(ticket)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        status, answer = await bench.decode(await bench.prefill())
        assert answer["choices"][0]["text"] == right()
        assert bench.states() == {"given": 2, "lost": 1, "pulled": 1}

    with_bench(test)


def test_heartbeats_keep_a_lease_while_its_reader_waits_in_line() -> None:
    async def test(bench: Bench) -> None:
        first = asyncio.create_task(bench.decode(None, prompt="other", request_id="x"))
        await until(lambda: bench.lab.engines["D0"].ranks[0].running == 1)
        ticket = await bench.prefill()
        status, answer = await bench.decode(ticket)
        assert (status, answer["choices"][0]["text"]) == (200, right())
        assert bench.states()["renewed"] >= 2
        assert "expired" not in bench.states()
        await first

    with_bench(test, lease_seconds=0.12, max_num_seqs=1, decode_step_seconds=0.02)


def test_a_client_that_leaves_has_its_ticket_released() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        await bench.fault("delay=60,phase=decode")
        leaving = asyncio.create_task(bench.decode(ticket))
        await until(lambda: bench.lab.engines["D0"].load == 1)
        leaving.cancel()
        await until(bench.lab.ledger.at_rest)
        assert bench.states() == {"given": 1, "released": 1}

    with_bench(test)


def test_a_refusal_with_a_ticket_releases_it() -> None:
    async def test(bench: Bench) -> None:
        status, _ = await bench.decode(await bench.prefill(), min_tokens=99)
        assert status == 400
        assert bench.states() == {"given": 1, "released": 1}

    with_bench(test)


def test_requests_wait_for_blocks_and_go_on_when_a_lease_ends() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        waiting = asyncio.create_task(bench.prefill(request_id="second"))
        await until(lambda: bench.lab.engines["P0"].ranks[0].waiting == 1)
        assert not waiting.done()
        await bench.decode(ticket)
        assert (await waiting)["remote_engine_id"] == ticket["remote_engine_id"]

    with_bench(test, kv_blocks=6)


def test_speeds_take_their_time() -> None:
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        ticket = await bench.prefill()
        assert loop.time() - began >= 0.06
        began = loop.time()
        await bench.decode(ticket)
        assert loop.time() - began >= 20 * 0.005 + 0.05

    with_bench(test, prefill_tokens_per_second=1000, decode_step_seconds=0.005, handshake_seconds=0.05)


def test_write_mode_meets_by_request_id_whoever_comes_first() -> None:
    async def test(bench: Bench) -> None:
        status, about = await bench.get("P0", "/baton/engine")
        told = {
            "do_remote_prefill": True,
            "remote_engine_id": about["engine_id"],
            "remote_host": "127.0.0.1",
            "remote_port": about["side_channel_port"],
            "remote_request_id": "r",
            "tp_size": 1,
        }
        decoding = asyncio.create_task(bench.decode(told))
        await until(lambda: bench.lab.engines["D0"].ranks[0].running == 1)
        await bench.prefill()
        status, answer = await decoding
        assert (status, answer["choices"][0]["text"]) == (200, right())
        # The other way round.
        ticket = await bench.prefill(request_id="s")
        assert ticket["transfer_mode"] == "push"
        status, answer = await bench.decode(ticket, request_id="s")
        assert (status, answer["choices"][0]["text"]) == (200, right())
        assert bench.states() == {"given": 2, "pulled": 2}

    with_bench(test, mode=TransferMode.WRITE)


def test_write_mode_a_reader_that_leaves_frees_the_writers_blocks_before_and_after() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill(request_id="warm")
        await bench.decode(ticket, request_id="warm")
        leaving = asyncio.create_task(bench.decode(ticket))
        await until(lambda: bench.lab.engines["D0"].ranks[0].running == 1)
        leaving.cancel()
        await until(lambda: bench.lab.engines["D0"].ranks[0].running == 0)
        await bench.prefill()
        await until(bench.lab.ledger.at_rest)
        assert bench.states() == {"given": 2, "pulled": 1, "released": 1}

    with_bench(test, mode=TransferMode.WRITE)


def test_a_kept_turn_is_the_start_of_the_next_prompt() -> None:
    async def test(bench: Bench) -> None:
        status, answer = await bench.decode(await bench.prefill())
        kept = answer["kv_transfer_params"]
        assert (kept["do_remote_decode"], kept["do_remote_prefill"]) == (True, False)
        assert kept["remote_blocks_expiry_time"] > 0
        assert bench.lab.ledger.at_rest()
        longer = PROMPT + answer["choices"][0]["text"] + " and then the fox went home"
        ticket = await bench.prefill(prompt=longer, request_id="next", kv_transfer_params=kept)
        assert ticket["remote_prefill_cached_tokens"] >= len(PROMPT) // 4 // 16 * 16
        status, answer = await bench.decode(ticket, prompt=longer, request_id="next", kv=1)
        assert (status, answer["choices"][0]["text"]) == (200, right(longer))
        assert bench.lab.ledger.poison == []

    with_bench(test, bidirectional=True)


def test_a_pushing_engine_says_nothing_of_when_its_blocks_go() -> None:
    async def test(bench: Bench) -> None:
        assert set(await bench.prefill()) == VLLM_KEYS - {"remote_blocks_expiry_time"}

    with_bench(test, mode=TransferMode.WRITE)


def test_a_stream_of_responses_has_a_turns_ticket_in_its_last_response_and_on_top() -> None:
    async def test(bench: Bench) -> None:
        _, first = await bench.post("P0", leg(RESPONSES), RESPONSES)
        body = {**BODIES[RESPONSES], "stream": True, "kv_transfer_params": first["kv_transfer_params"]}
        _, raw = await bench.post("D0", body, RESPONSES)
        last = json.loads(raw.rstrip().rpartition("data: ")[2])
        assert last["type"] == "response.completed"
        assert last["response"]["kv_transfer_params"]["do_remote_decode"] is True
        assert last["response"]["kv_transfer_params"] == last["kv_transfer_params"]

    with_bench(test, bidirectional=True)


def test_a_kept_turn_of_another_conversation_is_released_and_the_prompt_computed() -> None:
    async def test(bench: Bench) -> None:
        _, answer = await bench.decode(await bench.prefill())
        other = PROMPT[::-1]
        ticket = await bench.prefill(prompt=other, request_id="o", kv_transfer_params=answer["kv_transfer_params"])
        assert ticket["remote_prefill_cached_tokens"] == 0
        assert bench.states()["released"] == 1

    with_bench(test, bidirectional=True)


def test_ranks_have_engine_ids_of_their_own() -> None:
    async def test(bench: Bench) -> None:
        tickets = [await bench.prefill(request_id=str(number)) for number in range(4)]
        base = bench.lab.engines["P0"].engine_id
        assert {ticket["remote_engine_id"] for ticket in tickets} == {f"{base}_dp0", f"{base}_dp1"}
        assert len({ticket["remote_port"] for ticket in tickets}) == 2
        for number, ticket in enumerate(tickets):
            _, answer = await bench.decode(ticket, request_id=str(number))
            assert answer["choices"][0]["text"] == right()

    with_bench(test, dp_size=2)


def test_prompts_shorter_than_a_block_hand_over_like_any_other() -> None:
    async def test(bench: Bench) -> None:
        for length in range(1, 16):
            ids = list(range(length))
            ticket = await bench.prefill(prompt=ids, request_id=str(length))  # type: ignore[arg-type]
            assert len(ticket["remote_block_ids"][0]) == 1
            assert (await bench.decode(ticket, prompt=ids, request_id=str(length)))[0] == 200  # type: ignore[arg-type]
        assert bench.states() == {"given": 15, "pulled": 15}

    with_bench(test)


def test_an_engine_that_is_to_restart_does_not_outlive_its_lab() -> None:
    async def go() -> int:
        async with bench() as made:
            await made.fault("restart=0.05,engine=P0")
            with pytest.raises(aiohttp.ClientError):
                await made.post("P0", {"prompt": PROMPT})
            engine = made.lab.engines["P0"]
        await asyncio.sleep(0.1)
        assert not engine.listening
        return engine.starts

    assert asyncio.run(go()) == 1


def test_a_ticket_that_lacks_a_key_is_that_requests_own_400() -> None:
    async def test(bench: Bench) -> None:
        status, answer = await bench.decode({"do_remote_prefill": True})
        assert status == 400
        assert answer["error"]["message"] == "kv_transfer_params lacks remote_engine_id"

    with_bench(test)


@pytest.mark.parametrize("path", PATHS)
def test_every_endpoint_hands_over_in_json_and_in_events(path: str) -> None:
    async def test(bench: Bench) -> None:
        for stream in (False, True):
            _, answer = await bench.post("P0", leg(path), path)
            body = {**BODIES[path], "stream": stream, "kv_transfer_params": answer["kv_transfer_params"]}
            status, _ = await bench.post("D0", body, path)
            assert status == 200
        assert bench.states() == {"given": 2, "pulled": 2}

    with_bench(test)


def test_metrics_have_vllms_names() -> None:
    async def test(bench: Bench) -> None:
        await bench.decode(await bench.prefill())
        _, text = await bench.get("D0", "/metrics")
        assert (
            'vllm:prompt_tokens_by_source_total{model_name="sim",engine="0",source="external_kv_transfer"} 48' in text
        )
        assert 'vllm:nixl_bytes_transferred_count{model_name="sim",engine="0"} 1' in text

    with_bench(test)


async def heard(bench: Bench, engine: str, body: dict[str, Any]) -> tuple[int, bytes, bool]:
    """Status, what came, and whether the framing was whole."""
    status, came = 0, b""
    try:
        async with bench.client.post(bench.url(engine) + "/v1/completions", json=body) as response:
            status = response.status
            async for piece in response.content.iter_any():
                came += piece
    except aiohttp.ClientError:
        return status, came, False
    return status, came, True


BODY = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("fault", "stream", "status", "whole", "says"),
    [
        ("status=503", False, 503, True, b"a fault that was asked for"),
        ("front-status=502", False, 502, True, b"gateway"),
        ("reset", False, 0, False, b""),
        ("refuse,engine=D0", False, 0, False, b""),
        ("cut", False, 200, False, b'"id"'),
        ("split=1", True, 200, True, b"[DONE]"),
        ("cut-stream=2", True, 200, False, b"data: "),
        ("no-done", True, 200, True, b'"finish_reason":"length"'),
        ("error-event=2", True, 200, True, b"Internal server error"),
        ("error-event", False, 500, True, b"Internal server error"),
    ],
)
def test_a_fault_is_what_it_says(fault: str, stream: bool, status: int, whole: bool, says: bytes) -> None:
    async def test(bench: Bench) -> None:
        await bench.fault(fault)
        got, came, framed = await heard(bench, "D0", {**BODY, "stream": stream})
        assert (got, framed) == (status, whole)
        assert says in came
        assert (b"[DONE]" in came) == (fault in ("split=1", "error-event=2"))
        await bench.fault()
        got, came, framed = await heard(bench, "D0", {**BODY, "stream": stream})
        assert (got, framed) == (200, True)

    with_bench(test)


def test_an_engine_that_stands_still_answers_when_it_wakes() -> None:
    async def test(bench: Bench) -> None:
        assert (await bench.post("P0", {"engine": "D0"}, "/sim/stall"))[0] == 200
        asking = asyncio.create_task(bench.decode(None))
        await asyncio.sleep(0.05)
        assert not asking.done()
        assert (await bench.post("P0", {"engine": "D0"}, "/sim/wake"))[0] == 200
        assert (await asking)[0] == 200

    with_bench(test)


def test_the_ledger_and_the_faults_are_asked_over_http() -> None:
    async def test(bench: Bench) -> None:
        ticket = await bench.prefill()
        status, ledger = await bench.get("D0", "/sim/ledger")
        assert (status, ledger["at_rest"], ledger["counts"]) == (200, False, {"given": 1})
        assert ledger["held"][0]["request_id"] == ticket["remote_request_id"]
        status, faults = await bench.post("D0", ["status=418,engine=P0"], "/sim/faults")
        assert (status, faults[0]["kind"]) == (200, "status")
        assert (await bench.post("P0", BODY))[0] == 418
        assert (await bench.post("P0", ["explode"], "/sim/faults"))[0] == 400
        before = bench.lab.engines["P0"].engine_id
        assert (await bench.post("D0", {"engine": "P0"}, "/sim/restart"))[0] == 200
        assert bench.lab.engines["P0"].engine_id != before
        assert (await bench.get("D0", "/sim/nothing"))[0] == 404

    with_bench(test)
