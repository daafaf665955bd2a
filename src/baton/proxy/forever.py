"""What is done again and again while the proxy runs: one step that breaks must not be the last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("baton.proxy")


async def forever(seconds: float, step: Callable[[], Awaitable[None]]) -> None:
    """Do *step* every so many *seconds* until cancelled, whatever it raises: that is logged."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await step()
        except Exception:
            logger.exception("a step broke that is done again and again: it goes on")
