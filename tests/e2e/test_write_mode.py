"""Write mode on real engines: the text is right, and nothing stays behind when a leg is given up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import tiny
from tests.e2e.engines import Server, eventually, post, status
from tests.e2e.test_hand_off import ASK
from tests.e2e.topology import (
    MODEL,
    Cluster,
    Engine,
    answers,
    check,
    cluster,
    prompts,
    reference,
    used_kv,
)

ANSWER_SECONDS, STALL_SECONDS = 8, 3
BOUNDS = {"push_answer_seconds": ANSWER_SECONDS, "push_stall_seconds": STALL_SECONDS}
PUSH = Engine(("--transfer-mode", "write", "--kv-transfer-config", json.dumps({"kv_connector_extra_config": BOUNDS})))


@pytest.fixture(scope="module")
def pushing(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("push", model, logs, prefill=(PUSH,), decode=(PUSH,)) as made:
        yield made


def about(server: Server) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(urllib.request.urlopen(f"{server.url}/baton/engine", timeout=30).read())
    return value


def ticket_of(server: Server) -> dict[str, Any]:
    """What a decode server is told, from what the prefill server says of itself."""
    known = about(server)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": known["engine_id"],
        "remote_host": known["side_channel_host"],
        "remote_port": known["side_channel_port"],
        "tp_size": known["tp_size"],
    }


def both(pushing: Cluster, prompt: list[int], late: str = "") -> str:
    """The answer to *prompt*, both legs sent at once, or the one of the role *late* after the other is under way."""
    name = {"X-Request-Id": uuid.uuid4().hex}
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    prefill, decode = pushing.prefill[0], pushing.decode[0]
    legs = {
        "prefill": (prefill, {**body, "max_tokens": 1, "kv_transfer_params": ASK}),
        "decode": (decode, {**body, "max_tokens": 12, "kv_transfer_params": ticket_of(prefill)}),
    }

    def send(role: str) -> Any:
        server, sent = legs[role]
        if role == late:
            time.sleep(0.3)  # for the other to be first; either order must do
        return post(f"{server.url}/v1/completions", sent, name)

    with ThreadPoolExecutor(2) as pool:
        (_, decoded) = pool.map(send, legs)
    code, _, raw = decoded
    assert code == 200, raw
    return str(json.loads(raw)["choices"][0]["text"])


def used(pushing: Cluster) -> float:
    return used_kv([*pushing.prefill, *pushing.decode])


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_either_leg_may_come_first(pushing: Cluster, late: str) -> None:
    prompt = prompts()["129 tokens"]
    (expected,) = answers(pushing.decode[0].url, {"": prompt}).values()
    assert both(pushing, prompt, late) == expected
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


def test_the_text_is_one_servers_through_the_proxy(pushing: Cluster) -> None:
    """The proxy has asked the engines what they are: nobody told it of write mode."""
    asked = prompts()
    check(pushing, reference(pushing.decode[0], asked), asked)
    assert pushing.proxy.metric("baton_prefill_without_ticket_total") == 0
    assert pushing.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcdefgh" * 9}], "max_tokens": 8}),
        ("/v1/responses", {"input": "abcdefgh" * 9, "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "abcdefgh" * 9}], "max_tokens": 8}),
    ],
)
def test_the_legs_of_every_endpoint_meet(pushing: Cluster, path: str, body: dict[str, Any]) -> None:
    """Each has its own way to the id by which engines match them."""
    made = []
    for server in (pushing.decode[0], pushing.proxy):
        code, _, raw = post(f"{server.url}{path}", {"model": MODEL, "temperature": 0, **body})
        assert code == 200, raw
        value = json.loads(raw)
        made.append([value.get("choices") or value.get("content") or value["output"][-1]["content"]])
    texts = [re.findall(r"'(?:content|text)': '([^']*)'", str(each)) for each in made]
    assert texts[0]
    assert texts[0] == texts[1]
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


def test_the_engines_say_that_they_push(pushing: Cluster) -> None:
    for server in (*pushing.prefill, *pushing.decode):
        assert about(server)["transfer_mode"] == "push"


@contextlib.contextmanager
def waiting(server: Server, body: dict[str, Any], request_id: str) -> Iterator[None]:
    """A request that *server* has taken; who asked leaves at the end."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        lines = ("POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json")
        head = "\r\n".join((*lines, f"X-Request-Id: {request_id}", f"Content-Length: {len(raw)}", "", ""))
        client.sendall(head.encode() + raw)

        def taken() -> bool:
            return server.metric("vllm:num_requests_waiting") + server.metric("vllm:num_requests_running") > 0

        assert eventually(taken, True), "the request does not arrive"
        yield


def test_a_decode_leg_that_is_given_up_frees_its_blocks_though_nothing_is_pushed(pushing: Cluster) -> None:
    """Its prefill leg is never sent: vLLM by itself would hold the blocks for ever."""
    body = {"model": MODEL, "prompt": prompts()["150 tokens"], "max_tokens": 4}
    with waiting(pushing.decode[0], {**body, "kv_transfer_params": ticket_of(pushing.prefill[0])}, uuid.uuid4().hex):
        assert used(pushing) > 0
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


def test_a_prefill_whose_decode_leg_was_given_up_frees_its_blocks(pushing: Cluster) -> None:
    """Well before the 30 s of its lease."""
    name = uuid.uuid4().hex
    body = {"model": MODEL, "prompt": prompts()["150 tokens"], "max_tokens": 4}
    with waiting(pushing.decode[0], {**body, "kv_transfer_params": ticket_of(pushing.prefill[0])}, name):
        pass
    code, _, raw = post(
        f"{pushing.prefill[0].url}/v1/completions",
        {**body, "max_tokens": 1, "kv_transfer_params": ASK},
        {"X-Request-Id": name},
    )
    assert code == 200, raw
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0
    assert pushing.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total") == 0


def test_eight_pairs_of_legs_at_once_are_not_mixed_up(pushing: Cluster) -> None:
    asked = prompts(seed=5)
    expected = reference(pushing.decode[0], asked)
    with ThreadPoolExecutor(8) as pool:
        got = dict(zip(asked, pool.map(lambda prompt: both(pushing, prompt), asked.values()), strict=True))
    assert got == expected
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


def test_waiting_does_not_spin(pushing: Cluster) -> None:
    """A decode server that waits for a push would burn a core and more, which its prefill server may need."""
    decode = pushing.decode[0]
    leader = psutil.Process(decode.process.pid)
    family = [leader, *leader.children(recursive=True)]

    def spent() -> float:
        return float(sum(sum(each.cpu_times()[:2]) for each in family))

    body = {"model": MODEL, "prompt": prompts()["150 tokens"], "max_tokens": 4}
    asked = {**body, "kv_transfer_params": ticket_of(pushing.prefill[0])}
    with waiting(decode, asked, uuid.uuid4().hex):
        before, began = spent(), time.monotonic()
        time.sleep(2)  # what is measured
        assert (spent() - before) / (time.monotonic() - began) < 0.5
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


@contextlib.contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """All processes of *server* stopped, as by a host that swaps or a debugger; on they go at the end."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


def test_blocks_for_a_prefill_server_that_stands_still_come_back_and_it_serves_again(pushing: Cluster) -> None:
    """The decode server waits for an answer, not for ever; what the other wakes up with is in nobody's blocks."""
    (prefill,), (decode,) = pushing.prefill, pushing.decode
    asked = prompts(seed=9)
    expected = reference(decode, asked)
    body = {"model": MODEL, "prompt": asked["150 tokens"], "max_tokens": 4}
    told = ticket_of(prefill)
    names = [uuid.uuid4().hex for _ in range(2)]
    with standing_still(prefill):
        for name in names:
            with waiting(decode, {**body, "kv_transfer_params": told}, name):
                assert eventually(lambda: used_kv([decode]) > 0, True)
        began = time.monotonic()
        assert eventually(lambda: used_kv([decode]), 0.0) == 0.0
        assert time.monotonic() - began > STALL_SECONDS, "it stood still for less than the test is about"
    # One of the prefill legs comes all the same, late: its blocks are not kept either.
    late = {**body, "max_tokens": 1, "kv_transfer_params": ASK}
    code, _, raw = post(f"{prefill.url}/v1/completions", late, {"X-Request-Id": names[0]})
    assert code == 200, raw
    with ThreadPoolExecutor(8) as pool:
        got = dict(zip(asked, pool.map(lambda prompt: both(pushing, prompt), asked.values()), strict=True))
    assert got == expected
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0
    assert eventually(lambda: status(f"{pushing.proxy.url}/readiness"), 200) == 200
    assert answers(pushing.proxy.url, asked, 8) == expected


def test_who_still_waits_when_a_prefill_server_goes_on_gets_its_answer(pushing: Cluster) -> None:
    """It trusts no registration from before: the decode server's request would wait for ever if that were all."""
    (prefill,), (decode,) = pushing.prefill, pushing.decode
    prompt = prompts(seed=13)["150 tokens"]
    (expected,) = answers(decode.url, {"": prompt}).values()
    name = {"X-Request-Id": uuid.uuid4().hex}
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        asked = {**body, "max_tokens": 12, "kv_transfer_params": ticket_of(prefill)}
        decoded = pool.submit(post, f"{decode.url}/v1/completions", asked, name)
        assert eventually(lambda: used_kv([decode]) > 0, True)
        time.sleep(0.5)  # for the registration to arrive; one that comes later is taken when it goes on
        with standing_still(prefill):
            time.sleep(STALL_SECONDS + 2)  # what is tested
        late = {**body, "max_tokens": 1, "kv_transfer_params": ASK}
        code, _, raw = post(f"{prefill.url}/v1/completions", late, name)
        assert code == 200, raw
        code, _, raw = decoded.result(60)
    assert code == 200, raw
    assert json.loads(raw)["choices"][0]["text"] == expected
    assert eventually(lambda: used(pushing), 0.0, 25.0) == 0.0


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_every_rank_pushes_its_part_and_lets_go(
    prefill: int, decode: int, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks register, push and free each by itself; also when a client has left."""
    sides = [Engine((*PUSH.flags, "--tensor-parallel-size", str(count))) for count in (prefill, decode)]
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster(f"push-{prefill}-{decode}", model, logs, prefill=sides[:1], decode=sides[1:]) as made:
        asked = prompts()
        check(made, reference(made.decode[0], asked), asked)
        body = {"model": MODEL, "prompt": asked["129 tokens"], "max_tokens": 12}
        with waiting(made.decode[0], {**body, "kv_transfer_params": ticket_of(made.prefill[0])}, uuid.uuid4().hex):
            assert used(made) > 0
        assert eventually(lambda: used(made), 0.0, 25.0) == 0.0
