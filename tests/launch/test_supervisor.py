"""The supervisor with real, small children."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baton.launch import ChildDied, Command, StartTimeout, Supervisor
from baton.launch.leftovers import session_alive
from baton.launch.supervisor import make_scratch

GRANDCHILD = """
import os, signal, sys, time
from multiprocessing import shared_memory, resource_tracker
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(segment._name, "shared_memory")
if os.fork() == 0:
    pass
os.write(1, (segment.name + "\\n").encode())  # one write a line: two processes write to this log
time.sleep(600)
"""


def python(code: str) -> Command:
    return Command({}, (sys.executable, "-c", code))


async def never() -> bool:
    return False


def run(work: Callable[[Supervisor], Awaitable[None]], logs: Path) -> None:
    async def go() -> None:
        async with Supervisor(logs) as supervisor:
            await work(supervisor)

    asyncio.run(go())


def test_a_child_that_dies_ends_the_wait_within_two_seconds_with_its_last_lines(tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        await supervisor.start("P0", python("import time; time.sleep(600)"), never)
        await supervisor.start("D0", python("print('first'); raise ValueError('the KV cache is too small')"), never)
        started = time.monotonic()
        with pytest.raises(ChildDied) as caught:
            await supervisor.until_ready(60)
        assert time.monotonic() - started < 10  # of which Python's own start is the most
        assert str(caught.value) == (
            "D0 died while importing vLLM (exit code 1): ValueError: the KV cache is too small "
            f"[log: {tmp_path / 'D0.log'}]"
        )
        assert caught.value.last_lines[0] == "first"

    run(work, tmp_path)


def test_a_killed_child_is_named_with_its_signal(tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        await supervisor.start("P0", python("import os; os.kill(os.getpid(), 9)"), never)
        with pytest.raises(
            ChildDied, match=r"P0 died while importing vLLM \(killed by SIGKILL\): nothing in its log says why"
        ):
            await supervisor.until_ready(60)

    run(work, tmp_path)


def test_the_deadline_says_who_was_doing_what(tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        child = await supervisor.start(
            "P0", python("print('Starting to load model'); import time; time.sleep(600)"), never
        )
        while not child.log.read_bytes():
            await asyncio.sleep(0.01)
        with pytest.raises(StartTimeout, match=r"not ready after 1 s: P0 \(loading weights\)"):
            await supervisor.until_ready(1)

    run(work, tmp_path)


def test_ready_children_are_waited_for_and_their_death_is_noticed(tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        async def yes() -> bool:
            return True

        child = await supervisor.start("P0", python("import time; time.sleep(600)"), yes)
        await supervisor.until_ready(60)
        assert (child.phase, child.ready_after is not None) == ("ready", True)
        child.process.kill()
        with pytest.raises(ChildDied, match="P0 died while ready"):
            await supervisor.until_death()

    run(work, tmp_path)


def test_stopping_leaves_no_process_no_shared_memory_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.launch.supervisor.STOP_SECONDS", 0.5)  # it ignores SIGTERM
    seen: dict[str, object] = {}

    async def work(supervisor: Supervisor) -> None:
        child = await supervisor.start("P0", python(GRANDCHILD), never)
        while child.log.read_text().count("\n") < 2:  # both the child and what it forked
            await asyncio.sleep(0.01)
        seen["segment"] = Path("/dev/shm") / child.log.read_text().split()[0]
        seen["group"] = child.process.pid
        seen["scratch"] = supervisor._scratch
        assert Path(str(seen["segment"])).exists()

    run(work, tmp_path)
    assert not session_alive(int(str(seen["group"])))
    assert not Path(str(seen["segment"])).exists()
    assert not Path(str(seen["scratch"])).exists()


def test_a_long_tmpdir_does_not_make_socket_paths_too_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    for base in (str(long), "/tmp"):
        scratch = make_scratch(base)
        assert len(str(scratch / ("s" * 36))) <= 107
        scratch.rmdir()


def test_a_failure_inside_stops_the_children_too(tmp_path: Path) -> None:
    groups: list[int] = []

    async def work(supervisor: Supervisor) -> None:
        child = await supervisor.start("P0", python("import time; time.sleep(600)"), never)
        groups.append(child.process.pid)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run(work, tmp_path)
    assert not session_alive(groups[0])


def test_work_under_watch_ends_with_the_child(tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        child = await supervisor.start("P0", python("import time; time.sleep(600)"), never)
        await supervisor.watching(asyncio.sleep(0))

        async def fail() -> None:
            raise ValueError("its own")

        with pytest.raises(ValueError, match="its own"):
            await supervisor.watching(fail())
        child.process.kill()
        with pytest.raises(ChildDied, match="killed by SIGKILL"):
            await supervisor.watching(asyncio.sleep(600))

    run(work, tmp_path)
