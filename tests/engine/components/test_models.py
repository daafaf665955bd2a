"""Whole models on the workers of a decode server whose replicas share their components: loading, layers, sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
"""No servers, but vLLM's workers in processes of their own, and half a minute each."""

ALL = ("attention", "embedding", "mlp", "lm_head")


@pytest.mark.parametrize(
    ("kind", "ranks", "components"),
    [("llama", 2, ALL), ("qwen3", 1, ALL), ("qwen3_moe", 2, ("attention", "embedding", "lm_head"))],
    ids=["llama", "qwen3-with-one-matrix-for-embedding-and-lm-head", "qwen3-moe-with-experts-spread"],
)
def test_replicas_with_different_batches_have_one_servers_logits(
    kind: str, ranks: int, components: tuple[str, ...], tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "tests.engine.components.whole_model", str(tmp_path), kind, "2", str(ranks)]
    done = subprocess.run([*argv, *components], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [tuple(map(float, line.split())) for line in done.stdout.splitlines()[-2:]]
    assert len(lines) == 2
    for difference, largest in lines:
        assert largest > 1
        assert difference < 1e-4 * largest
