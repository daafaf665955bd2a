from __future__ import annotations

import asyncio
import time

from baton.proxy.deadlines import Deadlines


def test_what_is_over_is_cancelled_and_what_was_stopped_is_not() -> None:
    async def test() -> None:
        deadlines = Deadlines(0.05)
        ended: list[tuple[str, bool]] = []

        async def work(name: str, seconds: float) -> None:
            deadline = deadlines.start(time.monotonic())
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                assert deadline.over and deadline.task.uncancel() == 0
            finally:
                deadlines.stop(deadline)
            ended.append((name, deadline.over))

        await asyncio.gather(work("slow", 60.0), work("quick", 0.0), work("slow too", 60.0))
        assert sorted(ended) == [("quick", False), ("slow", True), ("slow too", True)]
        # and the timer is set anew
        await asyncio.wait_for(work("later", 60.0), 30.0)
        assert ended[-1] == ("later", True)
        deadlines.close()

    asyncio.run(test())
