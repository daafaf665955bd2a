"""What the first hand-off of a pair of engines costs, with and without the proxy's warm-up.

Two prefill and two decode servers of a tiny model. Each has answered a request by itself before, so that what is
measured is the pair's own: two pairs are met by a client first, the two others by the warm-up.

    python -m bench.handshake [--logs DIR]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from tests.e2e import tiny
from tests.e2e.engines import BATON, Server, post, start
from tests.e2e.topology import MODEL, Engine, answer, cluster, untried_pairs
from tests.ports import free_port

LATER = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", metavar="DIR", help="where logs stay (default: they go)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="handshake-") as folder:
        logs = Path(args.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = tiny.llama(Path(folder) / "model")
        engines = (Engine(),) * 2
        with cluster("bench", model, logs, prefill=engines, decode=engines, proxy=("--no-warm-up",)) as fleet:
            for server in (*fleet.prefill, *fleet.decode):
                answer(server.url, list(range(20, 60)))
            print("| pair | the proxy | its warm-up | first request | median of the next |")
            print("| --- | --- | --- | --- | --- |")
            for place, (prefill, decode) in enumerate(((0, 0), (1, 1), (0, 1), (1, 0))):
                warms = place > 1
                measure(f"P{prefill} to D{decode}", fleet.prefill[prefill], fleet.decode[decode], logs, warms)


def measure(name: str, prefill: Server, decode: Server, logs: Path, warms: bool) -> None:
    """One row: a proxy of its own over the pair, and requests through it."""
    port = free_port()
    words = (*BATON, "proxy", "--port", str(port), "--warm-up" if warms else "--no-warm-up")
    words += ("--prefiller-ports", str(prefill.port), "--decoder-ports", str(decode.port))
    proxy = start(name.replace(" ", "-"), words, port, logs)
    try:
        proxy.wait_healthy()
        assert untried_pairs(proxy) == 0
        first, later = ask(proxy, 0), sorted(ask(proxy, 1 + number)[0] for number in range(LATER))
        said = re.search(r"warmed up: .* in ([0-9.]+) s", proxy.log.read_text())
        own = f"{said.group(1)} s" if said is not None else "none"
        flag = "--warm-up" if warms else "--no-warm-up"
        print(
            f"| {name} | `{flag}` | {own} | {first[0]:.2f} s, status {first[1]} | {later[LATER // 2]:.2f} s |",
            flush=True,
        )
    finally:
        proxy.stop()


def ask(proxy: Server, number: int) -> tuple[float, int]:
    """Seconds and status of one request; a cold pair on a busy machine may fail."""
    started = time.monotonic()
    body = {"model": MODEL, "prompt": [20 + number, *range(20, 60)], "max_tokens": 4, "temperature": 0}
    code, _, _ = post(f"{proxy.url}/v1/completions", body)
    return time.monotonic() - started, code


if __name__ == "__main__":
    main()
