"""The doctor on real engines: nothing wrong, then each role used as the other."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from typing import Any

from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import BATON, Server


def about(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/baton/engine", timeout=30) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def examined(pair: Pair, prefill: Server, decode: Server, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings for the proxy of *pair* and these two."""
    flags = {
        "--port": pair.proxy.port,
        "--prefill-port": prefill.port,
        "--decode-port": decode.port,
        "--prefill-side-channel-port": about(prefill)["side_channel_port"],
        "--decode-side-channel-port": about(decode)["side_channel_port"],
    }
    ports = [word for name, port in flags.items() for word in (name, str(port))]
    command = [*BATON, "doctor", MODEL, *ports, *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_pair_that_works_has_nothing_wrong_and_moves_bytes(pair: Pair) -> None:
    code, findings = examined(pair, pair.prefill, pair.decode)
    # Leases that ran out and transfers that failed are other tests' doing: the pair is everybody's.
    wrong = [each for each in findings if each["verdict"] in ("bad", "note")]
    assert (code, [each for each in wrong if each["check"] not in ("leases", "transfers")]) == (0, [])
    (hand_off,) = (each for each in findings if each["check"] == "hand-off")
    moved = int(hand_off["what"].split(" bytes")[0].replace(",", ""))
    # 30 layers of 3 key-value heads of 64 numbers in float32, keys and values: 46,080 bytes a token.
    assert moved > 0
    assert moved % 46_080 == 0


def test_roles_that_are_swapped_are_named(pair: Pair) -> None:
    code, findings = examined(pair, pair.decode, pair.prefill, "--no-hand-off")
    assert code == 1
    said = {each["subject"]: each["what"] for each in findings if each["check"] == "role"}
    assert said == {
        "P0": "is used as a prefill server and was started as kv_consumer",
        "D0": "is used as a decode server and was started as kv_producer",
    }
