"""What the plan says that an engine of the embedded model takes, against what one takes."""

from __future__ import annotations

import json
import subprocess

from tests.e2e.conftest import FLAGS, MODEL, Pair
from tests.e2e.engines import BATON, memory_of


def test_the_memory_that_was_planned_is_what_engines_take(pair: Pair) -> None:
    done = subprocess.run(
        [*BATON, "plan", MODEL, "--json", "--", *FLAGS], capture_output=True, text=True, timeout=120, check=True
    )
    for process, server in zip(
        json.loads(done.stdout)["hosts"][0]["processes"], (pair.prefill, pair.decode), strict=False
    ):
        planned, taken = process["memory_bytes"]["total"], memory_of(server.process.pid)
        print(f"{server.name}: {planned / 1e9:.2f} GB planned, {taken / 1e9:.2f} taken")
        assert 0.8 < planned / taken < 1.2, (server.name, planned, taken)
