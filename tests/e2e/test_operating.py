"""The commands on a running cluster, on real engines: one cluster for all, each test leaves it as 1P1D."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.launch import load, observe
from baton.launch.leftovers import session_members
from tests.e2e import tiny
from tests.e2e.engines import BATON, START_SECONDS, events, memory_of, post
from tests.e2e.topology import MODEL, TOKENS_OUT, answers, prompts
from tests.e2e.up import NOTHING, Up, clear

KV_BYTES = 2 << 30
FILE = """
# a comment
model: {folder}
defaults:
  limits: {{max_model_len: 1024, max_num_seqs: 8, kv_cache_memory_bytes: {kv_bytes}}}
  engine_args: --served-model-name tiny --dtype float32 --block-size 32 --no-enable-prefix-caching
proxy: {{flags: --health-check-timeout-secs 30}}
prefill: 1
decode: 1
"""
LONG = 500
"""Tokens of an answer that takes seconds."""


@dataclass(frozen=True)
class Operated:
    """A cluster that `baton up -f FILE` keeps.

    Attributes:
        expected: what its prefill server answers by itself, by the prompts' names.
    """

    up: Up
    file: Path
    expected: Mapping[str, str]

    def baton(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BATON, *words], env=self.up.environ, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )

    def done(self, *words: str) -> list[str]:
        """What a command says that must succeed."""
        ended = self.baton(*words)
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
        return ended.stdout.splitlines()

    def rows(self) -> dict[str, dict[str, Any]]:
        """What `baton status` knows, by the processes' names; without the start of its process, to ask often."""
        record = load("default", self.up.environ)
        assert record is not None
        return {row["id"]: row for row in asyncio.run(observe(record, self.up.environ))["processes"]}

    def until(self, good: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """The status once it is *good*."""
        deadline = time.monotonic() + START_SECONDS
        while not good(rows := self.rows()):
            assert time.monotonic() < deadline, rows
            time.sleep(0.2)
        return rows

    def check_answers(self) -> None:
        assert answers(self.up.url, ASKED, 4) == self.expected


ASKED = prompts()


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operating")
    model = tiny.llama(folder / "model")
    file = folder / "baton.yaml"
    file.write_text(FILE.format(folder=model, kv_bytes=KV_BYTES))
    up = Up(folder, "-f", str(file))
    try:
        up.wait_for("Ctrl-C stops everything")
        expected = answers(f"http://127.0.0.1:{up.ports[1]}", ASKED)
        assert len(set(expected.values())) > len(expected) // 2
        yield Operated(up, file, expected)
    finally:
        clear(up)


class Traffic:
    """Requests one after the other, from several clients, until the end of the block."""

    def __init__(self, operated: Operated, clients: int = 2) -> None:
        self._operated = operated
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        self.served: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until(self, good: Callable[[list[str]], bool]) -> None:
        """Wait until those that served the requests are *good*."""
        deadline = time.monotonic() + START_SECONDS
        while not good(self.served):
            assert time.monotonic() < deadline, self.served
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        names = list(ASKED)
        while not self._stop.is_set():
            number += 1
            name = names[number % len(names)]
            body = {"model": MODEL, "prompt": ASKED[name], "max_tokens": TOKENS_OUT, "temperature": 0}
            code, headers, raw = post(f"{self._operated.up.url}/v1/completions", {**body, "ignore_eos": True})
            text = json.loads(raw)["choices"][0]["text"] if code == 200 else raw.decode()
            if code != 200 or text != self._operated.expected[name]:
                self.wrong.append(f"{name}: {code} {text}")
            self.served.append(headers.get("x-baton-decode", "nobody"))


class Stream(threading.Thread):
    """A long streamed answer.

    Attributes:
        begun: set when its first bytes are here.
        decode: who makes it.
        ended: when it ended, on the monotonic clock; None while it runs.
    """

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        super().__init__()
        data = json.dumps({**body, "stream": True}).encode()
        self._request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        self.begun = threading.Event()
        self.decode = ""
        self.raw = b""
        self.ended: float | None = None
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=START_SECONDS) as response:
            self.decode = response.headers["x-baton-decode"]
            while part := response.read1():
                self.raw += part
                self.begun.set()
        self.ended = time.monotonic()

    def text(self) -> str:
        """All of it; it must have ended whole."""
        self.join(START_SECONDS)
        return "".join(event["choices"][0]["text"] for event in events(self.raw) if event["choices"])


def test_status_shows_what_each_process_does(operated: Operated) -> None:
    operated.check_answers()
    lines = operated.done("status")
    assert lines[0].strip() == f"default: tiny at {operated.up.url}"
    assert lines[1].split()[:3] == ["id", "state", "url"]
    ports = dict(zip(("P0", "D0", "proxy"), (*operated.up.ports[1:3], operated.up.port), strict=True))
    assert [line.split()[:3] for line in lines[2:5]] == [
        [name, "ready", f"http://127.0.0.1:{port}"] for name, port in ports.items()
    ]

    def at_rest(rows: dict[str, dict[str, Any]]) -> bool:
        loads = [rows[name]["engine"] or {"running": None} for name in ("P0", "D0")]
        return all(load.get(key) == 0 for load in loads for key in ("running", "waiting", "kv_cache_usage"))

    # Engines publish late that blocks are back.
    operated.until(at_rest)
    rows = {row["id"]: row for row in json.loads(operated.done("status", "--json")[0])["processes"]}
    assert list(rows) == ["P0", "D0", "proxy"]
    for name in ("P0", "D0"):
        engine, proxy = rows[name]["engine"], rows[name]["proxy"]
        assert (engine["running"], engine["waiting"], engine["kv_cache_usage"]) == (0.0, 0.0, 0.0)
        assert engine["version"].startswith("0.")
        assert (proxy["usable"], proxy["in_flight"], proxy["held"]) == (True, 0, 0)
        assert (rows[name]["boots"], rows[name]["failures"]) == (1, 0)
    # In read mode decode servers pull, and whoever pulls counts.
    assert operated.until(lambda now: now["D0"]["engine"]["bytes_moved"] > 0)["P0"]["engine"].get("bytes_moved", 0) == 0


def test_logs_are_shown_by_name(operated: Operated) -> None:
    log = operated.up.logs / "D0.log"
    before = len(log.read_text().splitlines())
    said = operated.done("logs", "D0", "-n", "4")
    # It is written on all the while: who looks at the state of an engine is in its log.
    lines = log.read_text().splitlines()
    assert said in [lines[end - 4 : end] for end in range(before, len(lines) + 1)]
    assert operated.baton("logs", "D9").stderr == "baton: there is no instance 'D9': there are P0, D0, proxy\n"


def test_the_memory_that_was_planned_is_what_engines_take(operated: Operated) -> None:
    rows = operated.rows()
    plan = json.loads("\n".join(operated.done("plan", "-f", str(operated.file), "--json")))
    planned = {each["id"]: each["memory_bytes"]["total"] for each in plan["hosts"][0]["processes"][:2]}
    taken = {name: memory_of(rows[name]["pid"]) for name in planned}
    print({name: (f"{planned[name] / 1e9:.2f} GB planned", f"{taken[name] / 1e9:.2f} taken") for name in planned})
    for name, size in planned.items():
        assert 0.8 < size / taken[name] < 1.2, (name, size, taken[name])


def test_servers_come_go_and_start_anew_without_one_failed_request(operated: Operated) -> None:
    body = {"model": MODEL, "prompt": ASKED["77 tokens"], "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    code, _, raw = post(f"http://127.0.0.1:{operated.up.ports[1]}/v1/completions", body)
    assert code == 200
    long_answer = json.loads(raw)["choices"][0]["text"]
    ids = {name: row["proxy"]["engine_id"] for name, row in operated.rows().items() if name != "proxy"}
    with Traffic(operated) as traffic:
        said = operated.done("scale", "--decode", "2")
        assert said[0] == "starting D1"
        assert said[-1].startswith("D1 serves at http://127.0.0.1:")
        traffic.until(lambda served: "D1" in served)

        # A rolling restart waits for what is under way.
        stream = Stream(operated.up.url, body)
        assert stream.begun.wait(START_SECONDS)
        name, other = stream.decode, {"D0": "D1", "D1": "D0"}[stream.decode]
        heard: dict[str, float] = {}
        with subprocess.Popen(
            [*BATON, "restart", name], env=operated.up.environ, stdout=subprocess.PIPE, text=True
        ) as restart:
            assert restart.stdout is not None
            for line in restart.stdout:
                heard[line.strip()] = time.monotonic()
        assert restart.returncode == 0
        assert stream.text() == long_answer
        assert list(heard) == [
            f"draining {name}",
            f"{name} has nothing under way",
            f"{name} is stopped; starting it again",
            f"{name} serves again",
        ]
        assert stream.ended is not None
        assert heard[f"draining {name}"] < stream.ended < heard[f"{name} is stopped; starting it again"]
        at = len(traffic.served)
        traffic.until(lambda served: name in served[at:] and other in served[at:])
        assert operated.rows()[name]["boots"] == 2

        # What is drained gets nothing new.
        assert operated.done("drain", "D1") == ["draining D1", "D1 has nothing under way"]
        assert operated.rows()["D1"]["state"] == "draining"
        at = len(traffic.served)
        traffic.until(lambda served: len(served) > at + 20)
        assert set(traffic.served[at + 2 :]) == {"D0"}

        pid = operated.rows()["D1"]["pid"]
        assert operated.done("scale", "--decode", "1")[-1] == "D1 is stopped"
        assert not session_members(pid)
        rows = operated.rows()
        assert list(rows) == ["P0", "D0", "proxy"]
    assert traffic.wrong == []
    assert rows["P0"]["proxy"]["engine_id"] == ids["P0"]
    assert (rows["D0"]["proxy"]["engine_id"] == ids["D0"]) == (name == "D1")


def test_a_killed_engine_is_another_one_and_serves_at_once(operated: Operated) -> None:
    before = operated.rows()["D0"]
    os.kill(before["pid"], signal.SIGKILL)
    operated.until(lambda rows: rows["D0"]["pid"] != before["pid"])
    rows = operated.until(lambda rows: rows["D0"]["state"] == "ready" and rows["D0"]["proxy"]["usable"])
    operated.check_answers()
    after = operated.rows()["D0"]
    assert (after["boots"], after["failures"]) == (before["boots"] + 1, 1)
    assert "D0 died while ready (killed by SIGKILL)" in after["last_failure"]
    assert after["proxy"]["engine_id"] != before["proxy"]["engine_id"]
    assert rows["P0"]["pid"] == operated.rows()["P0"]["pid"]
    # The new one has pulled what it answered with.
    operated.until(lambda rows: rows["D0"]["engine"]["bytes_moved"] > 0)


def test_a_killed_supervisor_leaves_engines_serving_and_the_next_takes_them_over(operated: Operated) -> None:
    up = operated.up
    pids = {name: row["pid"] for name, row in operated.rows().items()}
    up.remember()
    up.process.kill()
    up.process.wait()
    operated.check_answers()
    ended = operated.baton("status")
    assert ended.returncode == 1
    assert "the supervisor is gone: `baton up` takes over what still runs" in ended.stdout
    assert "the supervisor of 'default' is gone" in operated.baton("scale", "--decode", "2").stderr
    others = subprocess.run(
        [*up.argv, "--decode", "2"], env=up.environ, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert (others.returncode, "was asked for in other words" in others.stderr) == (1, True), others.stderr

    up.start()
    up.wait_for("Ctrl-C stops everything")
    assert f"taken over: {up.url}" in up.out.read_text()
    rows = operated.rows()
    assert {name: row["pid"] for name, row in rows.items()} == pids
    assert {row["state"] for row in rows.values()} == {"ready"}
    operated.check_answers()
    second = subprocess.run(up.argv, env=up.environ, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert (second.returncode, "the cluster 'default' is up already" in second.stderr) == (1, True), second.stderr


def test_down_leaves_nothing(operated: Operated) -> None:
    up = operated.up
    for row in operated.rows().values():
        leader = psutil.Process(row["pid"])
        up.family |= {leader, *leader.children(recursive=True)}
    started = time.monotonic()
    said = operated.done("down")
    print(f"baton down took {time.monotonic() - started:.1f} s")
    assert said == [f"asking the supervisor (pid {up.process.pid}) to stop", "default: everything is stopped"]
    assert up.end() == 0
    assert up.left_behind() == NOTHING
    assert "no cluster 'default' is running" in operated.baton("status").stderr
