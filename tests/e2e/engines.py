"""Real processes for the end-to-end tests: start, wait, talk, stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.launch.leftovers import session_alive, session_members, shared_memory_of
from baton.launch.phases import reason_of

START_SECONDS = 400
"""Generous: a noisy machine takes several times the usual 20 s."""

BLOCK = 32
"""Tokens a KV block in these tests: small, so that many boundaries are cheap to visit."""

KV_BYTES_A_TOKEN = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in fp32: layers x (K and V) x KV heads x head size x bytes."""

BATON = (sys.executable, "-m", "baton.cli")


@dataclass
class Server:
    """One server process of ours in a session of its own."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    segments: set[Path] = field(default_factory=set)
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_healthy(self, path: str = "/health") -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None:
                lines = self.log.read_text(errors="replace").splitlines()
                raise AssertionError(f"{self.name} died: {reason_of(lines)}\n" + "\n".join(lines[-30:]))
            if status(f"{self.url}{path}") == 200:
                self.segments = shared_memory_of(self.process.pid)
                return
            assert time.monotonic() < deadline, f"{self.name} is not healthy after {START_SECONDS} s, see {self.log}"
            time.sleep(0.1)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a sample over its labels."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def stop(self) -> list[Path]:
        """Stop it; the shared memory that it left behind, removed now."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        # What it forked, Python's resource tracker among them, may end a moment later.
        deadline = time.monotonic() + 20
        while session_alive(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if session_alive(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        left = sorted(segment for segment in self.segments if segment.exists())
        for segment in left:
            segment.unlink(missing_ok=True)
        return left


def start(name: str, argv: tuple[str, ...], port: int, logs: Path, environ: Mapping[str, str] | None = None) -> Server:
    log = logs / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )
    return Server(name, process, port, log)


def status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers (lower case) and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def events(raw: bytes) -> Iterator[dict[str, Any]]:
    """The events of a whole stream; the end must be [DONE] and nothing may come after."""
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    for line in lines[:-1]:
        yield json.loads(line)


def generate(url: str, body: Mapping[str, Any]) -> str:
    """The text of a greedy answer, by completions or chat, streamed or not, as *body* asks."""
    chat = "messages" in body
    code, _, raw = post(f"{url}/v1/{'chat/' if chat else ''}completions", {"temperature": 0, **body})
    assert code == 200, raw[:1000]
    if body.get("stream"):
        parts = [event["choices"][0] for event in events(raw) if event["choices"]]
        return "".join((part["delta"].get("content") or "") if chat else part["text"] for part in parts)
    choice = json.loads(raw)["choices"][0]
    return str(choice["message"]["content"] if chat else choice["text"])


def generate_all(url: str, bodies: Mapping[str, Mapping[str, Any]], at_once: int = 4) -> dict[str, str]:
    """The texts of many requests, *at_once* under way at a time, by the names of *bodies*."""
    names: Iterable[str] = list(bodies)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(names, pool.map(lambda name: generate(url, bodies[name]), names), strict=True))


def eventually(read: Callable[[], Any], expected: Any, seconds: float = 120.0) -> Any:
    """*read* once it gives *expected*, or what it gives in the end: engines publish counters late."""
    deadline = time.monotonic() + seconds
    while (value := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def memory_of(session: int) -> int:
    """Bytes that the processes of a session take; pages that several share count once (PSS)."""
    return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in session_members(session))
