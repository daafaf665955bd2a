"""One engine of Baton's own command for a measurement, and how long it takes for a prompt and for a token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "measured"
"""What requests call its model."""

PROMPT = 20
"""Tokens of the prompts of those who decode."""

TELL_SECONDS = 15.0


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


class Engine:
    """A decode server that computes prompts too, healthy inside the block.

    Args:
        model: a folder or a name.
        kind: the word for it in tables.
        folder: for its log.
        port: its API; the side channel has those from *port* + 2.
        flags: of `baton engine`.
        environ: beside what this process has.
        start_seconds: limit for its start.
        progress: what to say of a start that takes long, by its log.

    Attributes:
        seconds: that its start took.
    """

    def __init__(
        self,
        model: str,
        kind: str,
        folder: Path,
        port: int,
        flags: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        start_seconds: float = 600.0,
        progress: Callable[[str], str] = lambda _: "not yet",
    ) -> None:
        self.kind, self.seconds = kind, 0.0
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{kind}.log"
        argv = [sys.executable, "-m", "baton.cli", "engine", model, "--role", "decode", "--port", str(port)]
        argv += ["--side-channel-port", str(port + 2), "--host", "127.0.0.1", "--no-enable-prefix-caching"]
        self._argv = [*argv, "--served-model-name", NAME, *flags]
        self._environ = environ or {}
        self._start_seconds, self._progress = start_seconds, progress

    def __enter__(self) -> Engine:
        say(f"starting {self.kind}")
        since = told = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._argv,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environ},
                start_new_session=True,
            )
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() - since > self._start_seconds:
                self.__exit__()
                raise SystemExit(f"{self._argv} did not start:\n{self.said()[-3000:]}")
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                say(f"{self.kind}: {told - since:.0f} s, {self._progress(self.said())}")
            time.sleep(0.1)
        self.seconds = time.monotonic() - since
        say(f"{self.kind} is healthy after {self.seconds:.1f} s")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def seconds_of(self, prompt: int, tokens: int, seed: int, headers: Mapping[str, str] | None = None) -> float:
        """Of one request with a prompt of its own, to the end of its answer."""
        ids = [10 + (17 * place + 31 * seed) % 250 for place in range(prompt)]
        body = {"model": NAME, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        every = {"Content-Type": "application/json", **(headers or {})}
        since = time.perf_counter()
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), every)
        urllib.request.urlopen(request, timeout=600).read()
        return time.perf_counter() - since

    def decode(self, clients: int, tokens: int, replicas: int = 1) -> float:
        """Milliseconds a token, *clients* at once, shared out over *replicas*."""

        def seconds(seed: int, out: int) -> float:
            headers = {"X-data-parallel-rank": str(seed % replicas)} if replicas > 1 else {}
            return self.seconds_of(PROMPT, out, seed, headers)

        with ThreadPoolExecutor(clients) as pool:
            short = list(pool.map(seconds, range(clients), [1] * clients))
            long = list(pool.map(seconds, range(clients), [1 + tokens] * clients))
        # What the prompts took is in both.
        return 1000 * (max(long) - max(short)) / tokens


def tiny(folder: Path) -> str:
    """A model of four small layers in *folder*, made when it is not there."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.e2e.tiny import llama

    made = folder / "tiny"
    return str(made if (made / "config.json").exists() else llama(made))
