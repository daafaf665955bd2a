"""A cluster that is kept up, with small processes in place of engines and proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.cli import main
from baton.cli.parser import Failure
from baton.cli.up import _log_folder
from baton.cluster import Cluster, Endpoint, Instance, Role
from baton.launch import ChildDied, Command, LaunchError, Problem, ProxyClient, ProxyRefused, Supervisor
from baton.launch.cluster_run import new_logs
from baton.launch.control import ControlFailed, ask_change, ask_status, listening
from baton.launch.down import take_down
from baton.launch.leftovers import session_alive
from baton.launch.observe import gauges, observe
from baton.launch.operate import LONGEST_WAIT_SECONDS, Operator, next_instance, ordered, wait_before
from baton.launch.record import ClusterRecord, holding, load, record_path, runs, save, sessions_of, strays
from baton.launch.rotation import rotate
from tests.launch.processes import METRICS, cluster_of, operator_of
from tests.launch.test_cluster_file import planned
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent.parent


@contextlib.asynccontextmanager
async def kept(folder: Path, **keeping: Any) -> AsyncIterator[tuple[Operator, list[str]]]:
    """A cluster that is up and kept, and what its changes say."""
    environ = {"XDG_STATE_HOME": str(folder)}
    async with Supervisor(folder / "logs", f"run-{folder}") as supervisor:
        operator = operator_of(supervisor, cluster_of(free_ports(5)), "c", environ, **keeping)
        await operator.begin()
        await supervisor.until_ready(60)
        operator.write()
        operator.opens()
        keep = asyncio.create_task(operator.keep())
        try:
            yield operator, []
        finally:
            keep.cancel()
            await asyncio.gather(keep, return_exceptions=True)
            await operator.close()


def with_kept(work: Callable[[Operator, list[str]], Awaitable[None]], folder: Path, **keeping: Any) -> None:
    async def go() -> None:
        async with kept(folder, **keeping) as (operator, said):
            await work(operator, said)

    asyncio.run(go())


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def row(operator: Operator, name: str) -> dict[str, Any]:
    return next(each for each in operator.status() if each["id"] == name)


def stored(folder: Path) -> ClusterRecord:
    record = load("c", {"XDG_STATE_HOME": str(folder)})
    assert record is not None
    return record


def test_what_ends_is_started_again_and_is_known_to_have_been(tmp_path: Path) -> None:
    async def work(operator: Operator, _: list[str]) -> None:
        child = operator.supervisor.child("D0")
        assert child is not None
        first = child.process.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: row(operator, "D0")["boots"] == 2 and row(operator, "D0")["state"] == "ready")
        said = row(operator, "D0")
        assert said["pid"] != first
        assert said["failures"] == 1
        assert "D0 died while ready (killed by SIGKILL)" in said["last_failure"]
        assert row(operator, "P0")["boots"] == 1
        kept_now = {each.name: (each.pid, each.boots) for each in stored(tmp_path).processes}
        assert kept_now["D0"] == (said["pid"], 2)
        # The log of the first start is still there.
        assert (tmp_path / "logs" / "D0.log").read_text().count("an engine in process") == 2

    with_kept(work, tmp_path)


@pytest.mark.parametrize("restarted", ["P0", "D0"])
def test_a_restart_in_the_midst_of_a_crash_leaves_one_of_each(tmp_path: Path, restarted: str) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        first = {each["id"]: each["pid"] for each in operator.status()}
        for name in ("P0", "D0"):
            os.kill(first[name], signal.SIGKILL)
        # What it forked lives on and is being cleared away.
        await until(lambda: row(operator, "P0")["last_failure"])
        await operator.restart([restarted], said.append)
        assert said[-1] == f"{restarted} serves again"
        assert not session_alive(first[restarted])
        await until(lambda: all(each["state"] == "ready" and each["boots"] == 2 for each in operator.status()[:2]))
        assert operator._reviving == {}
        pids = {each["pid"] for each in operator.status()}
        assert set(strays(operator.supervisor.run)) == pids
        # Those that end now are seen to as before.
        os.kill(row(operator, "D0")["pid"], signal.SIGKILL)
        await until(lambda: row(operator, "D0")["boots"] == 3 and row(operator, "D0")["state"] == "ready")

    with_kept(work, tmp_path, how=("outlived",))


def test_nothing_is_started_again_when_nobody_wants_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with Supervisor(tmp_path / "logs", f"run-{tmp_path}") as supervisor:
            environ = {"XDG_STATE_HOME": str(tmp_path)}
            operator = operator_of(supervisor, cluster_of(free_ports(5)), "c", environ, restarts=False)
            await operator.begin()
            await supervisor.until_ready(60)
            os.kill(supervisor.children[0].process.pid, signal.SIGKILL)
            with pytest.raises(ChildDied, match="P0 died while ready"):
                await operator.keep()

    asyncio.run(go())


def test_the_wait_doubles_and_is_bounded() -> None:
    assert [wait_before(number) for number in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert wait_before(1_000_000) == LONGEST_WAIT_SECONDS


def test_a_cluster_that_is_starting_tells_how_far_it_is_and_takes_no_changes(tmp_path: Path) -> None:
    async def go() -> None:
        environ = {"XDG_STATE_HOME": str(tmp_path)}
        async with Supervisor(tmp_path / "logs", f"run-{tmp_path}") as supervisor:
            operator = operator_of(supervisor, cluster_of(free_ports(5)), "c", environ)
            await operator.begin()
            async with listening(operator, operator.record.control):
                record = stored(tmp_path)
                states = {each["id"]: each["state"] for each in await ask_status(record)}
                assert states == {"P0": "importing vLLM", "D0": "importing vLLM", "proxy": "waiting for the engines"}
                for what, body in (("scale", {"decode": 2}), ("drain", ["D0"]), ("restart", ["D0"])):
                    with pytest.raises(ControlFailed, match="the cluster is still starting: `baton status` tells"):
                        await ask_change(record, what, body, lambda _: None)
                await supervisor.until_ready(60)
                assert {each["state"] for each in await ask_status(record)} == {"ready"}
                operator.opens()
                await ask_change(record, "drain", ["D0"], lambda _: None)

    asyncio.run(go())


def test_servers_come_and_go_while_it_serves(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        await operator.scale({Role.DECODE: 3}, said.append)
        assert [each.id for each in operator.cluster.instances] == ["P0", "D0", "D1", "D2"]
        routed = await operator._proxy.instances()
        assert {each["url"] for each in routed} == {each.url for each in operator.cluster.instances}
        assert all(row(operator, name)["state"] == "ready" for name in ("D1", "D2"))
        added = {name: row(operator, name)["pid"] for name in ("D1", "D2")}
        assert stored(tmp_path).cluster == operator.cluster

        await operator.scale({Role.DECODE: 1}, said.append)
        assert [each.id for each in operator.cluster.instances] == ["P0", "D0"]
        assert {each["url"] for each in await operator._proxy.instances()} == {
            each.url for each in operator.cluster.instances
        }
        assert not any(psutil.pid_exists(pid) for pid in added.values())
        assert "D1 has nothing under way" in said

        await operator.scale({Role.PREFILL: 1}, said.append)
        assert said[-1] == "there are 1 prefill servers already"
        with pytest.raises(LaunchError, match="--decode 0: a cluster needs at least one decode server"):
            await operator.scale({Role.DECODE: 0}, said.append)

    with_kept(work, tmp_path)


def test_ports_that_somebody_has_are_stepped_over(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        wanted = next_instance(operator.cluster, Role.DECODE, [])
        with (
            socket.create_server(("127.0.0.1", wanted.port)),
            socket.create_server(("127.0.0.1", wanted.side_channel_port)),
        ):
            await operator.scale({Role.DECODE: 2}, said.append)
        made = operator.cluster.instances[-1]
        assert made.port > wanted.port
        assert made.side_channel_port > wanted.side_channel_port
        assert said[-1] == f"D1 serves at http://127.0.0.1:{made.port}"

    with_kept(work, tmp_path)


def test_a_server_for_which_there_is_no_memory_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        looked: list[Command] = []

        def room(commands: list[Command]) -> list[Problem]:
            looked.extend(commands)
            return [Problem("too little memory")]

        monkeypatch.setattr(operator, "_room", room)
        with pytest.raises(LaunchError, match="too little memory"):
            await operator.scale({Role.DECODE: 3}, said.append)
        ports = [str(next_instance(operator.cluster, Role.DECODE, []).port + number) for number in (0, 1)]
        assert [command.argv[-1] for command in looked] == ports
        assert len(operator.supervisor.children) == 3

    with_kept(work, tmp_path)


def test_what_the_proxy_refuses_is_stopped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        async def refuse(*_: Any) -> None:
            raise ProxyRefused("the proxy answered 403")

        monkeypatch.setattr(operator._proxy, "add", refuse)
        before = operator.cluster
        with pytest.raises(ProxyRefused, match="403"):
            await operator.scale({Role.DECODE: 2}, said.append)
        assert operator.cluster == before
        assert {child.name for child in operator.supervisor.children} == {"P0", "D0", "proxy"}

    with_kept(work, tmp_path)


def test_what_the_proxy_took_in_before_it_refused_is_taken_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        add, added = operator._proxy.add, []

        async def refuse_the_second(endpoint: Endpoint) -> None:
            added.append(endpoint)
            if len(added) == 2:
                raise ProxyRefused("the proxy answered 403")
            await add(endpoint)

        monkeypatch.setattr(operator._proxy, "add", refuse_the_second)
        before = operator.cluster
        with pytest.raises(ProxyRefused, match="403"):
            await operator.scale({Role.DECODE: 3}, said.append)
        assert operator.cluster == before
        assert {each["url"] for each in await operator._proxy.instances()} == {each.url for each in before.instances}
        assert {child.name for child in operator.supervisor.children} == {"P0", "D0", "proxy"}

    with_kept(work, tmp_path)


def test_one_that_takes_the_name_of_one_that_went_is_no_heir_of_it(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        for wanted in (2, 1, 2):
            await operator.scale({Role.DECODE: wanted}, said.append)
        assert (row(operator, "D1")["state"], row(operator, "D1")["boots"]) == ("ready", 1)

    with_kept(work, tmp_path)


def test_what_runs_on_another_host_is_left_to_that_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of host one: P0 and D0 of 2P2D, and the proxy is on two."""
    cluster = cluster_of([1, 2, 3, 4, 5])
    ones = [each.model_copy(update={"node": "one"}) for each in cluster.instances]
    twos = [each.model_copy(update={"id": f"{each.id[0]}1", "node": "two"}) for each in ones]
    spread = cluster.model_copy(update={"instances": ordered((*ones, *twos)), "proxy_node": "two"})
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    operator = operator_of(Supervisor(tmp_path, "r", tmp_path), spread, "c", environ)
    operator.record = operator.record.model_copy(update={"node": "one"})
    operator.opens()
    for name, where in (("P1", "two"), ("proxy", "two")):
        for change in (operator.restart, operator.drain):
            with pytest.raises(LaunchError, match=f"{name} runs on {where}, and this is one: give the command there"):
                asyncio.run(change([name], lambda _: None))

    save(operator.record, environ)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked: list[object] = []
    monkeypatch.setattr("baton.cli.restart.change", lambda *words: asked.append(words) or 0)
    assert main(("restart", "--all", "--name", "c")) == 0
    assert asked == [("c", "restart", ["P0", "D0"])]
    assert main(("logs", "P1", "--name", "c")) == 2
    assert "P1 runs on two, and this is one: give the command there" in capsys.readouterr().err
    assert main(("logs", "P7", "--name", "c")) == 2
    assert "there is no instance 'P7': there are P0, D0" in capsys.readouterr().err


def test_runs_that_start_in_one_second_have_logs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    names = [new_logs(environ).name for _ in range(3)]
    assert names == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]


def test_the_log_folder_of_a_cluster_that_runs_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record = operator_of(Supervisor(tmp_path / "logs", "r", tmp_path), cluster_of([1, 2, 3, 4, 5]), "c", {}).record
    save(record.model_copy(update={"processes": (record.supervisor,)}))
    with pytest.raises(Failure, match="holds the logs of the cluster 'c', which runs: name another"):
        _log_folder(str(tmp_path / "x" / ".." / "logs"))
    assert _log_folder(str(tmp_path / "others")).is_dir()


HEEDING = """
import asyncio
from baton.cli.up import heed

async def go():
    stop = asyncio.Event()
    heed(stop)
    print("up", flush=True)
    await stop.wait()
    print("stopped", flush=True)

asyncio.run(go())
"""


@pytest.mark.parametrize("words", [(), ("nohup",)])
def test_a_closed_terminal_stops_it_unless_it_is_to_ignore_that(words: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [*words, sys.executable, "-c", HEEDING],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGHUP)
            if words:
                ignored = next(
                    line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigIgn" in line
                )
                assert int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1
                process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopped\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_restart_drains_first_and_is_no_failure(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        before = {each["id"]: each["pid"] for each in operator.status()}
        await operator.restart(["P0", "proxy"], said.append)
        after = {each["id"]: each["pid"] for each in operator.status()}
        assert {name for name in before if before[name] != after[name]} == {"P0", "proxy"}
        assert row(operator, "P0")["failures"] == 0
        assert said.index("draining P0") < said.index("P0 is stopped; starting it again")
        assert said[0].startswith("P0 is the only prefill server in use")
        assert {each["url"] for each in await operator._proxy.instances()} == {
            each.url for each in operator.cluster.instances
        }
        with pytest.raises(LaunchError, match="there is no instance 'D7': there are P0, D0"):
            await operator.restart(["D7"], said.append)

    with_kept(work, tmp_path)


@pytest.mark.parametrize("what", ["restart", "scale", "crash"])
def test_stopping_in_the_midst_of_a_change_leaves_nothing(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.launch.supervisor.STOP_SECONDS", 1.0)
    seen: list[ClusterRecord] = []
    stubborn = ("outlived", "stubborn")

    async def work(operator: Operator, said: list[str]) -> None:
        def ending(name: str) -> bool:
            child = operator.supervisor.child(name)
            return child is not None and child.ending is not None

        if what == "restart":
            change = asyncio.create_task(operator.restart(["P0"], said.append))
            await until(lambda: ending("P0"))
        elif what == "scale":
            await operator.scale({Role.DECODE: 2}, said.append)
            change = asyncio.create_task(operator.scale({Role.DECODE: 1, Role.PREFILL: 2}, said.append))
            await until(lambda: ending("D1"))
        else:
            change = asyncio.create_task(asyncio.sleep(0))
            os.kill(row(operator, "D0")["pid"], signal.SIGKILL)
            await until(lambda: ending("D0"))
        seen.append(stored(tmp_path))
        await operator.close()
        await asyncio.gather(change, return_exceptions=True)
        assert change.cancelled() or what == "crash"

    with_kept(work, tmp_path, how=stubborn)
    assert strays(seen[0].run) == []
    assert not any(session_alive(each.pid) for each in seen[0].processes)
    assert load("c", {"XDG_STATE_HOME": str(tmp_path)}) is None


def test_what_no_supervisor_knows_of_is_ended_with_the_rest(tmp_path: Path) -> None:
    """As an engine's own helper, in a session of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    async def work(operator: Operator, _: list[str]) -> None:
        environ = {**os.environ, "BATON_RUN": operator.record.run}
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        processes.append(subprocess.Popen(words, start_new_session=True, env=environ))
        await until(lambda: strays(operator.record.run, frozenset(each["pid"] for each in operator.status())))

    try:
        with_kept(work, tmp_path)
        assert processes[0].wait(60) == -signal.SIGTERM
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_record_of_another_run_is_not_forgotten(tmp_path: Path) -> None:
    async def work(operator: Operator, _: list[str]) -> None:
        save(operator.record.model_copy(update={"run": "another"}), {"XDG_STATE_HOME": str(tmp_path)})

    with_kept(work, tmp_path)
    assert stored(tmp_path).run == "another"


def test_a_drained_instance_is_shown_as_such(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        await operator.drain(["D0"], said.append)
        assert row(operator, "D0")["state"] == "draining"
        assert [each["usable"] for each in await operator._proxy.instances()] == [True, False]
        await operator.restart(["D0"], said.append)
        assert row(operator, "D0")["state"] == "ready"

    with_kept(work, tmp_path)


def test_a_proxy_that_is_started_again_knows_who_is_drained(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        await operator.scale({Role.DECODE: 2}, said.append)
        await operator.drain(["D0"], said.append)
        usable = [True, False, True]
        await operator.restart(["proxy"], said.append)
        assert [each["usable"] for each in await operator._proxy.instances()] == usable
        proxy = operator.supervisor.child("proxy")
        assert proxy is not None
        os.kill(proxy.process.pid, signal.SIGKILL)
        await until(lambda: row(operator, "proxy")["pid"] not in (None, proxy.process.pid))

        async def knows() -> bool:
            with contextlib.suppress(ProxyRefused):
                return [each["usable"] for each in await operator._proxy.instances()] == usable
            return False

        async with asyncio.timeout(60):
            while not await knows():
                await asyncio.sleep(0.02)
        assert row(operator, "D0")["state"] == "draining"

    with_kept(work, tmp_path)


def test_commands_reach_it_by_its_socket(tmp_path: Path) -> None:
    async def work(operator: Operator, said: list[str]) -> None:
        record = operator.record
        async with listening(operator, record.control):
            rows = await ask_status(record)
            assert [each["id"] for each in rows] == ["P0", "D0", "proxy"]
            await ask_change(record, "scale", {"decode": 2}, said.append)
            assert said[-1].startswith("D1 serves at")
            with pytest.raises(ControlFailed, match="there is no instance 'x'"):
                await ask_change(record, "drain", ["x"], said.append)
            seen = await observe(operator.record, {})
        assert seen["proxy_answers"]
        decode = next(each for each in seen["processes"] if each["id"] == "D1")
        assert decode["engine"] == {
            "running": 3.0,
            "kv_cache_usage": 0.5,
            "bytes_moved": 1.5e6,
            "version": "0.32.0",
        }
        assert decode["proxy"]["usable"]
        with pytest.raises(ControlFailed, match="cannot be asked"):
            await ask_status(record)

    with_kept(work, tmp_path)


def test_gauges_are_summed_and_the_fullest_cache_counts() -> None:
    assert gauges(METRICS.splitlines()) == {"running": 3.0, "kv_cache_usage": 0.5, "bytes_moved": 1.5e6}


class Crashed:
    """A supervisor in a process of its own, that can be killed."""

    def __init__(self, folder: Path, *how: str) -> None:
        self.folder, self.ports = folder, free_ports(5)
        words = ["up", "c", str(folder), ",".join(map(str, self.ports)), *how]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.processes", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def kill(self) -> ClusterRecord:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        record = stored(self.folder)
        assert not record.supervised
        assert {each.name for each in record.alive} == {"P0", "D0", "proxy"}
        return record


def test_what_a_killed_supervisor_leaves_is_ended_and_nothing_else(tmp_path: Path) -> None:
    record = Crashed(tmp_path).kill()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    # One that it had no time to write down.
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        start_new_session=True,
        env={**os.environ, "BATON_RUN": record.run},
    )
    try:
        said: list[str] = []
        asyncio.run(take_down(record, said.append, {"XDG_STATE_HOME": str(tmp_path)}))
        assert not record.alive
        assert stray.wait(10) is not None
        assert other.poll() is None
        assert load("c", {"XDG_STATE_HOME": str(tmp_path)}) is None
        assert not record.scratch.exists()
        assert strays(record.run) == []
    finally:
        for process in (other, stray):
            process.kill()
            process.wait()


def test_what_a_killed_supervisor_leaves_is_taken_over(tmp_path: Path) -> None:
    crashed = Crashed(tmp_path)
    left = crashed.kill()
    # One of them ended while nobody looked.
    gone = next(each for each in left.processes if each.name == "D0")
    os.kill(gone.pid, signal.SIGKILL)
    # Both were drained by the one that was killed: P0 as asked, D0 to be restarted.
    drained = ProxyClient.of(left.cluster, {})
    for each in left.cluster.instances:
        asyncio.run(drained.drain(each.url, 1.0))

    async def go() -> None:
        await until(lambda: not runs(gone))
        async with Supervisor(left.logs, left.run, left.scratch) as supervisor:
            operator = operator_of(supervisor, cluster_of(crashed.ports), "c", {"XDG_STATE_HOME": str(tmp_path)})
            await operator.begin(left.processes)
            await supervisor.until_ready(60)
            operator.write()
            assert {each["id"]: each["state"] for each in operator.status()} == {
                "P0": "draining",
                "D0": "ready",
                "proxy": "ready",
            }
            assert {each["role"]: each["usable"] for each in await drained.instances()} == {
                "prefill": False,
                "decode": True,
            }
            pids = {each.name: each.pid for each in left.processes}
            assert {each["id"] for each in operator.status() if each["pid"] == pids[each["id"]]} == {"P0", "proxy"}
            # Those that were taken over are watched as well.
            keep = asyncio.create_task(operator.keep())
            os.kill(pids["P0"], signal.SIGKILL)
            await until(lambda: row(operator, "P0")["boots"] == 2 and row(operator, "P0")["state"] == "draining")
            keep.cancel()
            await asyncio.gather(keep, return_exceptions=True)
            alive = stored(tmp_path)
        # Leaving stops those that were taken over too.
        assert not alive.alive

    asyncio.run(go())


def test_taking_over_ends_what_the_dead_have_left_and_keeps_their_logs(tmp_path: Path) -> None:
    crashed = Crashed(tmp_path, "outlived")
    left = crashed.kill()
    pids = {each.name: each.pid for each in left.processes}
    # Something that a process which lives has started in a session of its own is no stray.
    assert sessions_of(left.alive) >= set(pids.values())
    os.kill(pids["P0"], signal.SIGKILL)

    async def go() -> None:
        await until(lambda: len(left.alive) == 2)
        assert session_alive(pids["P0"])
        # As when it was killed between an end and the next start: D0 stands in no record any more.
        os.kill(pids["D0"], signal.SIGKILL)
        await until(lambda: len(left.alive) == 1)
        async with Supervisor(left.logs, left.run, left.scratch) as supervisor:
            operator = operator_of(supervisor, cluster_of(crashed.ports), "c", {"XDG_STATE_HOME": str(tmp_path)})
            await operator.begin([each for each in left.processes if each.name != "D0"])
            assert not session_alive(pids["P0"])
            assert not session_alive(pids["D0"])
            assert row(operator, "proxy")["pid"] == pids["proxy"]
            await supervisor.until_ready(60)
            for name in ("P0", "D0"):
                assert row(operator, name)["boots"] == 2
                assert (left.logs / f"{name}.log").read_text().count("an engine in process") == 2
            await operator.close()
        assert strays(left.run) == []

    asyncio.run(go())


def test_a_name_has_one_supervisor_and_is_free_once_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    words = ("up", str(tmp_path), "--name", "c")
    # One that has written nothing down yet.
    with holding("c", environ):
        assert main(words) == 1
        assert "another command is starting or ending the cluster 'c'" in capsys.readouterr().err
    crashed = Crashed(tmp_path)
    try:
        with pytest.raises(LaunchError, match="another command"), holding("c", environ):
            pass
        assert main(words) == 1
        assert f"the cluster 'c' is up already (supervisor pid {crashed.process.pid})" in capsys.readouterr().err
    finally:
        record = crashed.kill()
    # What it has started serves on, and does not have the lock.
    with holding("c", environ), pytest.raises(LaunchError, match="another command"):
        asyncio.run(take_down(record, lambda _: None, environ))
    assert len(record.alive) == 3
    asyncio.run(take_down(record, lambda _: None, environ))
    assert not record.alive


def test_a_running_supervisor_is_asked_to_stop(tmp_path: Path) -> None:
    crashed = Crashed(tmp_path)
    record = stored(tmp_path)
    assert record.supervised
    said: list[str] = []
    asyncio.run(take_down(record, said.append, {"XDG_STATE_HOME": str(tmp_path)}))
    assert said[0] == f"asking the supervisor (pid {crashed.process.pid}) to stop"
    assert crashed.process.wait(10) is not None
    assert crashed.process.stdout is not None
    crashed.process.stdout.close()
    assert not record.alive


def test_a_pid_that_is_somebody_elses_now_is_left_alone(tmp_path: Path) -> None:
    record = Crashed(tmp_path).kill()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        mistaken = record.processes[0].model_copy(update={"pid": bystander.pid})
        assert not runs(mistaken)
        asyncio.run(
            take_down(
                record.model_copy(update={"processes": (mistaken, *record.processes[1:])}),
                lambda _: None,
                {"XDG_STATE_HOME": str(tmp_path)},
            )
        )
        assert bystander.poll() is None
        # The one whose pid was not known any more is found by its mark.
        assert not record.alive
    finally:
        bystander.kill()
        bystander.wait()


def test_a_record_that_is_broken_is_named(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    path = record_path("c", environ)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(LaunchError, match=r"c\.json does not say what is running"):
        load("c", environ)
    with pytest.raises(LaunchError, match=r"--name '\.\./x': a cluster's name is"):
        load("../x", environ)


def test_a_record_is_its_owners_alone(tmp_path: Path) -> None:
    record = ClusterRecord.model_construct(name="c")
    save(record, {"XDG_STATE_HOME": str(tmp_path)})
    assert record_path("c", {"XDG_STATE_HOME": str(tmp_path)}).stat().st_mode & 0o077 == 0


def test_a_long_log_is_moved_aside_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "D0.log"
    assert not rotate(log, 10)
    with log.open("ab", buffering=0) as writer:
        for number in range(5):
            writer.write(b"%d" % number * 20)
            assert rotate(log, 10)
            assert log.stat().st_size == 0
    assert not rotate(log, 10)
    assert [(tmp_path / f"D0.log.{number}").read_bytes()[:1] for number in (1, 2, 3)] == [b"4", b"3", b"2"]
    assert not (tmp_path / "D0.log.4").exists()


def test_one_more_server_gets_a_name_and_ports_of_its_own() -> None:
    ports = [8000, 8100, 8101, 8102, 8103]
    cluster: Cluster = cluster_of(ports)
    wide = Instance(
        id="D1",
        role=Role.DECODE,
        host="127.0.0.1",
        port=8104,
        side_channel_port=8105,
        engine_args=("--data-parallel-size", "2"),
    )
    cluster = cluster.model_copy(update={"instances": (*cluster.instances, wide)})
    first = next_instance(cluster, Role.DECODE, [])
    second = next_instance(cluster, Role.DECODE, [first])
    assert (first.id, second.id) == ("D2", "D3")
    owned = [8000, 8100, 8101, 8102, 8103, 8104, 8105, 8106]
    for each in (first, second):
        mine = [each.port, each.side_channel_port, each.side_channel_port + 1]
        assert not set(mine) & set(owned), (mine, owned)
        owned += mine


def test_one_more_server_gets_devices_of_its_own() -> None:
    cluster = cluster_of([8000, 8100, 8101, 8102, 8103])
    prefill, decode = (
        each.model_copy(update={"devices": (4 * n, 4 * n + 1)}) for n, each in enumerate(cluster.instances)
    )
    more = next_instance(cluster.model_copy(update={"instances": (prefill, decode)}), Role.DECODE, [])
    assert more.devices == (2, 3)


CUDA = "model: m\ndevice: cuda\nhosts: {one: {address: 10.0.0.1, devices: %s}}\nprefill: {devices: 4}\n%s\n"


def test_one_more_server_gets_free_devices_of_its_host_or_is_refused(tmp_path: Path) -> None:
    cluster = planned(tmp_path, CUDA % ("4-6", "decode: {devices: 5}"))
    first = next_instance(cluster, Role.PREFILL, [], "one")
    assert (first.id, first.devices) == ("P1", (6,))
    with pytest.raises(LaunchError, match="P2 needs 1 devices, and one has 0 left of 3: stop another server first"):
        next_instance(cluster, Role.PREFILL, [first], "one")
    # A record outlives the supervisor.
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_next_to_a_server_that_may_use_all_devices_none_is_left(tmp_path: Path) -> None:
    text = "model: m\ndevice: cuda\nhosts: {a: 10.0.0.1, b: 10.0.0.2}\nprefill: 1\ndecode: 1\n"
    with pytest.raises(LaunchError, match="P0 may use all devices of a, so there is none left for P1"):
        next_instance(planned(tmp_path, text), Role.PREFILL, [], "a")
    named = "decode: {devices: 5, environ: {CUDA_VISIBLE_DEVICES: GPU-1}}"
    with pytest.raises(LaunchError, match="D0's environ has CUDA_VISIBLE_DEVICES=GPU-1, so nobody here knows what"):
        next_instance(planned(tmp_path, CUDA % ("4-6", named)), Role.DECODE, [], "one")


def test_one_more_server_gets_free_cores_first_and_then_those_that_the_fewest_use(tmp_path: Path) -> None:
    text = "model: m\nprefill: {cpus: 0-1}\ndecode: {cpus: 2}\n"
    cluster, made = planned(tmp_path, text, cpus=(0, 1, 2, 3)), list[Instance]()
    for _ in range(4):
        made.append(next_instance(cluster, Role.DECODE, made))
    assert [each.cpus for each in made] == [(3,), (0,), (1,), (2,)]
    shared = planned(tmp_path, "model: m\nprefill: 1\ndecode: 1\n", cpus=(0, 1))
    more = next_instance(shared, Role.DECODE, [])
    assert [each.cpus for each in (*shared.instances, more)] == [(0,), (1,), (0,)]
    unknown = shared.model_copy(update={"cpus": {}})
    assert next_instance(unknown, Role.DECODE, [more]).cpus == (1,)
