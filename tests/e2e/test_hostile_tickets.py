"""Whatever ticket reaches a real engine, it fails that request or is computed without: never garbage, never the end.

Each mode's pair is started once, without a warm-up, so that the first tickets meet engines that know nobody.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e import tiny
from tests.e2e.engines import Server, eventually, post, status
from tests.e2e.test_hand_off import ASK
from tests.e2e.topology import BLOCK, MODEL, TOKENS_OUT, Cluster, Engine, answer, cluster, used_kv

EXTRA = (
    "--kv-transfer-config",
    '{"kv_connector_extra_config": '
    '{"kv_lease_duration": 12, "push_registration_timeout": 4, "decoder_kv_blocks_ttl": 12}}',
)
MODES = {
    "write": Engine(("--transfer-mode", "write", *EXTRA)),
    "read": Engine(EXTRA),
    "turns": Engine(("--bidirectional-kv", "--remote-pull-threshold", "1", *EXTRA)),
}
LISTS, IN_LIST = 8, 20
"""Tickets a mode and role: 160."""


@dataclass
class Victims:
    """A pair under attack.

    Attributes:
        mode: one of :data:`MODES`.
        expected: answers by prompt, of an engine that was left alone.
    """

    mode: str
    cluster: Cluster
    expected: dict[tuple[int, ...], str]

    @property
    def prefill(self) -> Server:
        return self.cluster.prefill[0]

    @property
    def decode(self) -> Server:
        return self.cluster.decode[0]

    def loads(self) -> float:
        return self.decode.metric("baton_kv_loads_total")

    def right(self, prompt: Sequence[int]) -> str:
        if tuple(prompt) not in self.expected:
            self.expected[tuple(prompt)] = answer(self.decode.url, prompt)
        return self.expected[tuple(prompt)]

    def ticket(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """What the prefill server gives for *prompt*."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 1, "ignore_eos": True, "temperature": 0}
        code, _, raw = post(f"{self.prefill.url}/v1/completions", {**body, "kv_transfer_params": ASK, **more})
        assert code == 200, raw
        made: dict[str, Any] = json.loads(raw)["kv_transfer_params"]
        return made

    def send(self, server: Server, prompt: Sequence[int], ticket: Any) -> tuple[int, str | None]:
        """Status, and the text when it is 200."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": TOKENS_OUT, "ignore_eos": True, "temperature": 0}
        code, _, raw = post(f"{server.url}/v1/completions", {**body, "kv_transfer_params": ticket})
        return code, json.loads(raw)["choices"][0]["text"] if code == 200 else None

    def endures(self, server: Server, prompt: Sequence[int], ticket: Any) -> int:
        """Send it, look that it brings no garbage, and give the status."""
        expected = self.right(prompt)
        code, text = self.send(server, prompt, ticket)
        assert code >= 400 or text == expected, f"garbage: {text!r}, not {expected!r}, for {ticket!r}"
        return code

    def well(self) -> None:
        """A normal hand-off through the proxy gives the right text, moves the KV cache, and leaves nothing behind."""
        for length in (3, BLOCK, 3 * BLOCK + 7):
            prompt = tokens(length)
            before = self.loads()
            assert answer(self.cluster.proxy.url, prompt) == self.right(prompt)
            # A warm-up of the proxy's may be counted with it: an engine publishes its counts some time later.
            moved = eventually(lambda before=before: self.loads() > before, True)  # type: ignore[misc]
            assert moved is True, "nothing was transferred"
        assert eventually(lambda: used_kv([self.prefill, self.decode]), 0.0) == 0.0


def tokens(count: int, seed: int = 5) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 90) for _ in range(count)]


@pytest.fixture(scope="module", params=["read", "write", pytest.param("turns", marks=pytest.mark.long)])
def victims(request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    mode = request.param
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    more = ("--no-warm-up", *(("--turns",) if mode == "turns" else ()))
    with cluster(f"hostile-{mode}", model, logs, prefill=(MODES[mode],), decode=(MODES[mode],), proxy=more) as made:
        yield Victims(mode, made, {})


def about(server: Server) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(urllib.request.urlopen(f"{server.url}/baton/engine", timeout=30).read())
    return made


def naming(server: Server, blocks: Any, **more: Any) -> dict[str, Any]:
    """A well-formed ticket that names a real engine, and a request that it never had."""
    known = about(server)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": blocks,
        "remote_engine_id": known["engine_id"],
        "remote_request_id": "cmpl-nobody-0-0000",
        "remote_host": known["side_channel_host"],
        "remote_port": known["side_channel_port"],
        "tp_size": 1,
        "remote_num_tokens": 40,
        **more,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"tp_size": 2},
        {"tp_size": 3},
        {"tp_size": 1 << 16},
        {"pp_size": 4},
        {"dcp_size": 2},
        {"remote_port": 9},
        {"remote_host": "no such host"},
        {"remote_host": "192.0.2.1"},
        {"remote_engine_id": "somebody-else"},
    ],
    ids=str,
)
def test_a_first_ticket_that_misleads_the_handshake_spoils_it_for_nobody(victims: Victims, wrong: Any) -> None:
    prompt = tokens(40)
    for server, other in ((victims.decode, victims.prefill), (victims.prefill, victims.decode)):
        victims.endures(server, prompt, naming(other, [[1, 2]], **wrong))
        assert status(f"{server.url}/health") == 200


def test_after_that_all_is_well(victims: Victims) -> None:
    victims.well()


NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.sampled_from([0, 1, -1, 2, 1 << 31, (1 << 31) - 1, 1 << 63])
TEXTS = st.text(max_size=30) | st.sampled_from(["", "\u0000", "a" * 2000, "HB:x", "\u2028"])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
BLOCKS = st.lists(st.lists(st.integers(0, 300) | NUMBERS, max_size=6), max_size=3)
KEYS = (
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "pp_size", "dcp_size", "remote_num_tokens"),
    *("remote_blocks_expiry_time", "transfer_mode", "keep_blocks", "block_digests", "tail_digest", "block_size"),
)


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """What a ticket says otherwise than a real one; :data:`GONE` takes a key away."""
    made: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4)):
        made[key] = draw(st.just(GONE) | JUNK)
    if draw(st.booleans()):
        made["remote_block_ids"] = draw(BLOCKS)
    if draw(st.booleans()):
        made |= {"do_remote_prefill": False, "do_remote_decode": True}
    if draw(st.integers(0, 9)) == 0:
        made |= draw(st.dictionaries(TEXTS, JUNK, max_size=70))
    return made


GONE = "(gone)"


def changed(ticket: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**ticket, **change}.items() if value != GONE}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_ticket_ends_an_engine_or_brings_garbage(victims: Victims, role: str) -> None:
    """Property: real tickets, each with some of its values changed for anything."""
    server, other = victims.decode, victims.prefill
    if role == "prefill":
        server, other = other, server
    prompt = tokens(40)
    victims.right(prompt)
    forged, real = naming(other, [[1, 2]]), victims.ticket(prompt)
    base = [forged, real] if role == "decode" else [forged]
    codes: list[int] = []

    @settings(
        max_examples=LISTS,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(changes(), min_size=IN_LIST, max_size=IN_LIST))
    def attack(made: list[dict[str, Any]]) -> None:
        sent = [changed(base[index % len(base)], change) for index, change in enumerate(made)]
        with ThreadPoolExecutor(8) as pool:
            codes.extend(pool.map(lambda ticket: victims.endures(server, prompt, ticket), sent))
        assert status(f"{server.url}/health") == 200
        assert status(f"{other.url}/health") == 200

    attack()
    assert len(codes) >= LISTS * IN_LIST
    assert 400 in codes
    print(f"{victims.mode} {role}: { ({code: codes.count(code) for code in sorted(set(codes))}) }")


def test_after_that_all_is_still_well(victims: Victims) -> None:
    victims.well()


def only_reading(victims: Victims) -> None:
    if victims.mode == "write":
        pytest.skip("in write mode no ticket names blocks")


def test_a_used_ticket_brings_nothing(victims: Victims) -> None:
    only_reading(victims)
    prompt, others = tokens(70, 1), tokens(70, 2)
    ticket = victims.ticket(prompt)
    assert victims.send(victims.decode, prompt, {**ticket, "keep_blocks": False}) == (200, victims.right(prompt))
    assert eventually(lambda: used_kv([victims.prefill]), 0.0) == 0.0
    refused = victims.decode.metric("baton_kv_refused_reads_total")
    # Somebody else's prompt is in those blocks by now.
    victims.ticket(others)
    assert victims.endures(victims.decode, prompt, ticket) >= 400
    assert eventually(lambda: victims.decode.metric("baton_kv_refused_reads_total") - refused, 1.0) == 1.0


def test_a_ticket_whose_lease_has_ended_brings_nothing(victims: Victims) -> None:
    only_reading(victims)
    prompt = tokens(70, 3)
    ticket = victims.ticket(prompt)
    assert eventually(lambda: used_kv([victims.prefill]), 0.0) == 0.0
    victims.ticket(tokens(70, 4))
    assert victims.endures(victims.decode, prompt, ticket) >= 400


def test_a_ticket_is_good_for_its_own_prompt_alone(victims: Victims) -> None:
    only_reading(victims)
    one, other = tokens(70, 6), tokens(70, 7)
    assert victims.endures(victims.decode, other, victims.ticket(one)) >= 400


def test_a_ticket_is_good_for_its_own_blocks_in_their_order_alone(victims: Victims) -> None:
    only_reading(victims)
    one, other = tokens(70, 8), tokens(70, 9)
    mine, theirs = victims.ticket(one), victims.ticket(other)
    (blocks,) = mine["remote_block_ids"]
    for wrong in ([blocks[::-1]], theirs["remote_block_ids"], [[*blocks[:-1], blocks[-1] + 1]], [[blocks[0]] * 3]):
        assert victims.endures(victims.decode, one, {**mine, "remote_block_ids": wrong}) >= 400
    assert victims.endures(victims.decode, other, {**mine, "remote_request_id": theirs["remote_request_id"]}) >= 400


def test_a_push_goes_to_its_own_prompt_alone(victims: Victims) -> None:
    """The legs find each other by their request id: a forged one gets nothing.

    It takes the id with it: the decode server cancels what has failed, and the prefill server remembers the id.
    """
    if victims.mode != "write":
        pytest.skip("only in write mode are legs matched by their id")
    one, other = tokens(70, 6), tokens(70, 7)
    ticket = victims.ticket(one, request_id="meant-for-one")
    body = {
        "model": MODEL,
        "max_tokens": TOKENS_OUT,
        "ignore_eos": True,
        "temperature": 0,
        "kv_transfer_params": ticket,
    }
    for prompt, good in ((other, False), (one, True)):
        sent = {**body, "prompt": prompt, "request_id": "meant-for-one"}
        code, _, raw = post(f"{victims.decode.url}/v1/completions", sent)
        assert code in ((200, 500) if good else (500,)), raw
        assert code != 200 or json.loads(raw)["choices"][0]["text"] == victims.right(one)


DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "invocations": ("/invocations", {"prompt": "x", "max_tokens": 1}),
}
BAD = {"do_remote_prefill": True, "remote_engine_id": 7}


@pytest.mark.parametrize("door", list(DOORS))
@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
def test_every_door_refuses_a_malformed_ticket(victims: Victims, door: str, place: str) -> None:
    path, body = DOORS[door]
    sent = {"model": MODEL, **body, **({"kv_transfer_params": BAD} if place == "top" else {})}
    if place != "top":
        sent["vllm_xargs"] = {"kv_transfer_params": BAD}
    for server in (victims.decode, victims.prefill):
        text = json.dumps(sent)
        for raw in (text.encode(), text.replace("kv_", "\\u006bv_").encode(), text.encode("utf-16")):
            code, _, said = post(f"{server.url}{path}", raw)
            assert code == 400, said
            assert status(f"{server.url}/health") == 200


@pytest.mark.parametrize("rank", ["-1", "1", "99999999999", "\u00b2", "1e3", "0x1", "None"])
def test_a_rank_that_is_not_there_is_refused(victims: Victims, rank: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    code, _, said = post(f"{victims.decode.url}/v1/completions", body, {"X-data-parallel-rank": rank})
    assert code == 400, said
    assert b"data-parallel-rank" in said


@pytest.mark.parametrize("depth", [900, 200_000])
def test_a_deeply_nested_ticket_is_refused(victims: Victims, depth: int) -> None:
    nested = b'{"model": "%b", "prompt": "x", "kv_transfer_params": %b1%b}' % (
        MODEL.encode(),
        b'{"a": ' * depth,
        b"}" * depth,
    )
    code, _, said = post(f"{victims.decode.url}/v1/completions", nested)
    assert code == 400, said
    assert status(f"{victims.decode.url}/health") == 200


def test_garbage_on_the_side_channel_ends_nothing(victims: Victims) -> None:
    for server in (victims.decode, victims.prefill):
        known = about(server)
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 40):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((known["side_channel_host"], known["side_channel_port"]), 10) as made,
            ):
                made.sendall(garbage)


def test_at_the_end_all_is_well(victims: Victims) -> None:
    victims.well()
