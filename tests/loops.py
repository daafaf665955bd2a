"""Both event loops that Baton's servers run on: a test that passes on one may fail on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``asyncio.run`` use one loop, then the other."""
    if request.param == "uvloop":

        def run(main: Coroutine[Any, Any, Any]) -> Any:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(main)

        monkeypatch.setattr(asyncio, "run", run)
