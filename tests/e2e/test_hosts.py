"""2P2D over two hosts, one command each: network namespaces stand for them (netns.py), whose cables are pulled out.

The KV cache between them goes over UCX's TCP: one kernel below two "hosts" would let cross-memory attach through, which
no two hosts have. No request has a limit of its own: what ends one here is that its peer is known to be gone.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.engines import BATON, START_SECONDS, Server, eventually, post, start
from tests.e2e.netns import Host, NoNamespaces, network
from tests.e2e.test_hand_off import ASK
from tests.e2e.test_restarts import readiness
from tests.e2e.topology import FLAGS, MODEL, answers, prompts, reference, used_kv

TOKENS_BYTES = 4 * 2 * 4 * 32 * 4
"""Of one token's KV cache: layers x (K and V) x KV heads x head size x bytes."""

LONG = 480
"""Tokens: 1.9 MB of KV cache."""

SLOW_MBITS = 4.0
"""The transfer of a long prompt's takes about 4 s."""

GONE_SECONDS = 90.0
"""Generous: an engine that has vanished is given up after 25 s, a transfer after 40 s, and another one is asked."""

LEASE_SECONDS = 30.0
ENGINES = {"P0": ("one", 8100), "P1": ("two", 8100), "D0": ("one", 8200), "D1": ("two", 8200)}


@dataclass
class House:
    """The running cluster.

    Attributes:
        hosts: of the network, by name; nothing of the cluster is on ``three``.
        file: the cluster file.
        ups: one `baton up` a host.
        engines: by id.
        proxy: on ``one``.
        expected: what one server answers by itself, by the prompt's name.
    """

    hosts: Mapping[str, Host]
    file: Path
    ups: dict[str, Server]
    engines: dict[str, Server]
    proxy: Server
    expected: Mapping[str, str]

    def doctor(self, host: str, *words: str, file: Path | None = None) -> tuple[int, list[dict[str, Any]]]:
        """Exit code and findings of `baton doctor` on *host*."""
        argv = self.hosts[host].words(*BATON, "doctor", "-f", str(file or self.file), *words, "--json")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)["findings"]

    def made(self, prefill: str, prompt: Sequence[int]) -> dict[str, Any]:
        """The ticket of a KV cache that waits at this prefill server, made without the proxy."""
        code, made = ask(self.engines[prefill], prompt, max_tokens=1, kv_transfer_params=ASK)
        assert code == 200, made
        ticket: dict[str, Any] = made["kv_transfer_params"]
        return ticket

    def taken(self, decode: str, prompt: Sequence[int], ticket: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer of a decode server that takes it."""
        return ask(self.engines[decode], prompt, kv_transfer_params=ticket)

    def is_well(self) -> bool:
        """Whether the proxy uses all engines and has moved a KV cache over every pair."""
        code, said = readiness(self.proxy)
        return code == 200 and not said["reasons"] and said["warm_up"]["proven"] == 4

    def check(self) -> None:
        """All answers are right, and no block is left anywhere."""
        assert eventually(self.is_well, True, START_SECONDS) is True, readiness(self.proxy)
        assert answers(self.proxy.url, prompts(), 4) == self.expected
        assert eventually(lambda: used_kv(list(self.engines.values())), 0.0, 4 * LEASE_SECONDS) == 0.0


def ask(server: Server, prompt: Sequence[int], **more: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer to a greedy request."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 12, "ignore_eos": True, "temperature": 0, **more}
    code, _, raw = post(f"{server.url}/v1/completions", body)
    return code, json.loads(raw)


def text_of(answer: tuple[int, dict[str, Any]]) -> str | None:
    """None for one that is an error."""
    code, said = answer
    return str(said["choices"][0]["text"]) if code == 200 else None


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 90) for _ in range(count)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    try:
        with network(("one", "two", "three")) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(f"NOT TESTED HERE: clusters over several hosts. No network namespaces: {error}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("llama"))


def cluster_file(path: Path, model: Path, hosts: Mapping[str, Host], prefill: Sequence[str]) -> Path:
    """A file with prefill servers on these hosts; decode servers are on those of them that are ours, or on ``two``."""
    at = FLAGS.index("--host")
    decode = [name for name in ("one", "two") if name in prefill] or ["two"]
    value = {
        "model": str(model),
        "hosts": {name: hosts[name].address for name in dict.fromkeys((*prefill, *decode))},
        "ucx_tls": "tcp",
        "defaults": {
            "engine_args": [*FLAGS[:at], *FLAGS[at + 2 :]],
            "environ": {"OMP_NUM_THREADS": "1"},
        },
        "prefill": {"hosts": list(prefill)},
        "decode": {"hosts": decode, "port": 8200},
        "proxy": {"host": "one" if "one" in prefill else "two", "policy": "random"},
    }
    path.write_text(json.dumps(value))
    return path


@pytest.fixture(scope="module")
def house(
    hosts: dict[str, Host],
    model: Path,
    logs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("hosts")
    file = cluster_file(folder / "baton.yaml", model, hosts, ("one", "two"))
    ups: dict[str, Server] = {}
    try:
        for name in ("one", "two"):
            words = ("-f", str(file), "--host", name, "--log-dir", str(logs / f"hosts-{name}"))
            argv = hosts[name].words(*BATON, "up", *words)
            environ = {"XDG_STATE_HOME": str(folder / name)}
            ups[name] = start(f"hosts-{name}", argv, 8000, logs, environ)
        up = ups["one"]
        engines = {
            name: Server(
                name, ups[host].process, port, logs / f"hosts-{host}" / f"{name}.log", host=hosts[host].address
            )
            for name, (host, port) in ENGINES.items()
        }
        proxy = Server("proxy", up.process, 8000, up.log, host=hosts["one"].address)
        for server in (*engines.values(), proxy):
            server.wait_healthy()
        yield House(hosts, file, ups, engines, proxy, reference(engines["D0"], prompts()))
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.stop, ups.values()))


def test_one_command_a_host_brings_up_its_share(house: House) -> None:
    said = {
        name: eventually(lambda up=up: "Ctrl-C stops" in up.log.read_text(), True) for name, up in house.ups.items()
    }
    assert said == {"one": True, "two": True}
    assert f"ready after {{}} s: {house.proxy.url}".partition("{}")[2] in house.ups["one"].log.read_text()
    assert "s: the share of two; the proxy is on one" in house.ups["two"].log.read_text()
    assert eventually(house.is_well, True, START_SECONDS) is True, readiness(house.proxy)


def test_the_text_is_one_servers_whichever_pair_serves_it_and_bytes_cross(house: House) -> None:
    """Each pair serves some of it, and what goes from host to host is on the cable."""
    asked = prompts()
    assert answers(house.proxy.url, asked, 8) == house.expected

    def bytes_of(name: str) -> float:
        return house.engines[name].metric("vllm:nixl_bytes_transferred_sum")

    moved = {name: bytes_of(name) for name in ("D0", "D1")}
    crossed = house.hosts["two"].crossed()
    pairs: set[tuple[str, str]] = set()
    prompt, between = tokens(LONG, 1), 0
    expected = text_of(ask(house.engines["D0"], prompt))
    for _ in range(200):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        code, headers, raw = post(f"{house.proxy.url}/v1/completions", body)
        assert (code, json.loads(raw)["choices"][0]["text"]) == (200, expected)
        pair = headers["x-baton-prefill"], headers["x-baton-decode"]
        pairs.add(pair)
        between += ENGINES[pair[0]][0] != ENGINES[pair[1]][0]
        if len(pairs) == 4:
            break
    assert pairs == {("P0", "D0"), ("P0", "D1"), ("P1", "D0"), ("P1", "D1")}
    wanted = {name: before + 2 * LONG * TOKENS_BYTES for name, before in moved.items()}
    assert eventually(lambda: [name for name in wanted if bytes_of(name) < wanted[name]], []) == []
    assert house.hosts["two"].crossed() - crossed > between * LONG * TOKENS_BYTES


def test_the_doctor_finds_nothing_wrong_from_either_host(house: House) -> None:
    code, findings = house.doctor("two")
    assert code == 0, [each for each in findings if each["verdict"] == "bad"]
    moved = {each["subject"]: each["what"] for each in findings if each["check"] == "hand-off"}
    assert set(moved) == {"P0 to D0", "P0 to D1", "P1 to D0", "P1 to D1"}
    assert all(" bytes; prefill " in what for what in moved.values())
    code, findings = house.doctor("one", "--host", "one", "--no-hand-off")
    sides = {each["subject"]: each["verdict"] for each in findings if each["check"] == "side channel"}
    # In read mode decode servers, which are on both hosts, meet prefill servers.
    assert (code, sides) == (0, {"P0": "ok", "P1": "ok", "from other hosts": "skipped"})


def test_a_blocked_side_channel_is_told_in_words(house: House) -> None:
    """What is behind the firewall is seen from the other side of it, and from there alone."""
    one = house.hosts["one"]
    with one.blocked(5559):
        code, findings = house.doctor("two", "--host", "two", "--no-hand-off")
        (bad,) = (each for each in findings if each["verdict"] == "bad")
        assert (code, bad["check"], bad["subject"]) == (1, "side channel", "P0")
        assert bad["what"] == f"{one.address}:5559 cannot be reached from here: no answer within 3 s"
        assert "security group, firewall" in bad["remedy"]
        code, findings = house.doctor("one", "--host", "one", "--no-hand-off")
        assert (code, [each for each in findings if each["verdict"] == "bad"]) == (0, [])
        # Requests go on: a pair that fails is left alone.
        assert answers(house.proxy.url, prompts(), 4) == house.expected
    house.check()


def test_a_cable_that_is_out_for_some_seconds_in_a_transfer_harms_nothing(house: House) -> None:
    prompt = tokens(LONG, 2)
    expected = text_of(ask(house.engines["D0"], prompt))
    two, ticket = house.hosts["two"], house.made("P1", prompt)
    with two.slow(SLOW_MBITS), ThreadPoolExecutor(1) as pool:
        crossed = two.crossed()
        moving = pool.submit(house.taken, "D0", prompt, ticket)
        assert eventually(lambda: two.crossed() - crossed > LONG * TOKENS_BYTES // 8, True) is True
        assert not moving.done(), "the transfer was over before the cable was out"
        two.cut()
        time.sleep(3)
        two.join()
        assert text_of(moving.result(GONE_SECONDS)) == expected
    house.check()


class Clients:
    """Ask without pause until they are stopped; nobody waits for long, and no answer is wrong."""

    def __init__(self, house: House, count: int) -> None:
        self._house, self._stop, self._lock = house, threading.Event(), threading.Lock()
        self.right = 0
        self.failed: list[int] = []
        self.wrong: list[str] = []
        self.longest = 0.0
        self._pool = ThreadPoolExecutor(count)
        self._runs: list[Future[None]] = [self._pool.submit(self._run, number) for number in range(count)]

    def _run(self, number: int) -> None:
        asked, chance = prompts(), random.Random(number)
        while not self._stop.is_set():
            name, began = chance.choice(list(asked)), time.monotonic()
            answer = ask(self._house.proxy, asked[name])
            with self._lock:
                self.longest = max(self.longest, time.monotonic() - began)
                if answer[0] != 200:
                    self.failed.append(answer[0])
                elif text_of(answer) == self._house.expected[name]:
                    self.right += 1
                else:
                    self.wrong.append(name)

    def more(self, count: int) -> None:
        """Wait for so many more right answers."""
        wanted = self.right + count
        assert eventually(lambda: self.right >= wanted, True) is True, (self.failed, self.wrong)

    def stop(self) -> None:
        self._stop.set()
        for run in self._runs:
            run.result(4 * GONE_SECONDS)
        self._pool.shutdown()


def test_a_host_that_is_cut_off_costs_its_own_requests_at_most_and_comes_back(house: House) -> None:
    """Cut in the middle of a transfer, for longer than anybody waits: whoever is left answers."""
    prompt = tokens(LONG, 3)
    two = house.hosts["two"]
    clients = Clients(house, 4)
    try:
        clients.more(10)
        # Nobody but D0 is to wait for what is beyond the cable.
        ticket = house.made("P1", prompt)
        with two.slow(SLOW_MBITS), ThreadPoolExecutor(1) as pool:
            crossed = two.crossed()
            moving = pool.submit(house.taken, "D0", prompt, ticket)
            assert eventually(lambda: two.crossed() - crossed > LONG * TOKENS_BYTES // 4, True) is True
            two.cut()
            try:
                began = time.monotonic()
                clients.more(10)
                code, _ = moving.result(GONE_SECONDS)
                assert code >= 500
                assert time.monotonic() - began < GONE_SECONDS
                assert eventually(lambda: readiness(house.proxy)[1]["reasons"] != [], True) is True
                clients.more(20)
            finally:
                two.join()
        assert eventually(house.is_well, True, START_SECONDS) is True, readiness(house.proxy)
        clients.more(20)
    finally:
        clients.stop()
    assert clients.wrong == []
    assert set(clients.failed) <= {500, 502, 503, 504}
    assert clients.longest < GONE_SECONDS
    house.check()


@pytest.mark.long
def test_an_advertised_host_that_is_wrong_is_told_in_words(
    house: House, model: Path, logs: Path, tmp_path: Path
) -> None:
    """A prefill server on a third host that was started by hand, without --side-channel-host."""
    three = house.hosts["three"]
    argv = three.words(*BATON, "engine", str(model), "--role", "prefill", "--ucx-tls", "tcp", *FLAGS)
    argv = tuple(three.address if word == "127.0.0.1" else word for word in argv)
    server = start("hosts-three", argv, 8100, logs, {"OMP_NUM_THREADS": "1"})
    server.host = three.address
    try:
        server.wait_healthy()
        file = cluster_file(tmp_path / "three.yaml", model, house.hosts, ("three",))
        code, findings = house.doctor("two", "--host", "two", file=file)
        said = {each["check"]: each for each in findings if each["verdict"] == "bad" and each["subject"] == "P0"}
        assert code == 1
        advertised = said["advertised host"]
        assert advertised["what"] == "tells peers on two to meet it at 127.0.0.1, which is their own host"
        assert advertised["remedy"] == f"start it with --side-channel-host {three.address}"
        assert said["side channel"]["what"].startswith("127.0.0.1:5559 cannot be reached from here: ")
        (hand_off,) = (each for each in findings if each["check"] == "hand-off")
        assert (hand_off["subject"], hand_off["verdict"]) == ("P0 to D0", "bad")
        assert "from two 127.0.0.1:5559 must be open" in hand_off["remedy"]
    finally:
        server.stop()
    house.check()
