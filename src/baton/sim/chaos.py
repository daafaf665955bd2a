"""The campaign: every scenario against a real proxy in front of the lab, and what must hold after each.

``python -m baton.sim.chaos --seed 1 --requests 10000`` (``make chaos``); exit code 1 when anything did not hold, with
the line that runs exactly that again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import logging
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from baton.proxy import Proxy, ProxySettings
from baton.sim.faults import Fault
from baton.sim.judge import Heard, judge
from baton.sim.lab import Lab, specs
from baton.sim.scenarios import Ask, Scenario, asks, scenarios

REST_SECONDS = 1.0
"""How long after its last request a scenario may take to come to rest."""
LEG_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
"""After which a client that is still not answered is a failure."""
PROBE_SECONDS = 0.2
AT_ONCE = 16
_SHOWN = 3
_GAUGES = ("in_flight", "active", "queued", "outstanding")
"""What a gauge of the proxy that must be 0 at rest has in its name."""


@dataclass
class Report:
    """What became of one scenario.

    Attributes:
        broken: what did not hold, in a line each.
        verdicts: how many answers were right, were errors, or were wrong.
    """

    scenario: Scenario
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)


async def run(
    scenario: Scenario, seed: int, count: int, leg_seconds: float = LEG_SECONDS, rest_seconds: float = REST_SECONDS
) -> Report:
    """One scenario: *count* requests, and what must hold afterwards.

    Args:
        leg_seconds: how long the proxy waits for a leg.
        rest_seconds: how long it may take to come to rest after its last request.
    """
    report = Report(scenario)
    began = time.monotonic()
    before = asyncio.all_tasks()
    lab = Lab(specs(2, 2, scenario.settings, free_ports(4)), seed=seed)
    await lab.start()
    proxy = Proxy(
        ProxySettings(
            host="127.0.0.1",
            port=0,
            endpoints=lab.endpoints,
            transfer_mode=scenario.mode,
            request_timeout_seconds=leg_seconds,
            probe_interval_seconds=PROBE_SECONDS,
        )
    )
    try:
        ((_, port),) = await proxy.start()
        if scenario.fault is not None:
            await lab.set_faults([Fault.parse(scenario.fault)])
        await _ask_all(scenario, seed, asks(scenario, seed, count), f"http://127.0.0.1:{port}", report)
        await lab.set_faults([])
        await _check_rest(lab, proxy, report, rest_seconds)
    finally:
        await proxy.stop(0.0)
        await lab.stop()
    left = await _tasks_left(before)
    if left:
        report.broken.append(f"{len(left)} tasks left: {', '.join(sorted(left))}")
    report.seconds = time.monotonic() - began
    return report


async def _ask_all(scenario: Scenario, seed: int, all_asks: Sequence[Ask], url: str, report: Report) -> None:
    """Have clients ask, so many at a time, and judge what they hear."""
    places = asyncio.Semaphore(AT_ONCE)
    chance = random.Random(f"{seed}/{scenario.name}/leave")  # noqa: S311
    patience = [chance.uniform(0.0, 0.04) if scenario.leaves else None for _ in all_asks]
    limits = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:

        async def one(number: int, ask: Ask) -> None:
            async with places:
                try:
                    async with asyncio.timeout(patience[number]):
                        heard = await _hear(session, url, ask)
                except TimeoutError:
                    left = patience[number] is not None
                    report.verdicts["left" if left else "wrong"] += 1
                    if not left:
                        report.broken.append(f"request {number} on {ask.path} was never answered")
                    return
            refusals = "status=4" in scenario.what
            verdict = judge(ask.path, scenario.stream, ask.right, heard, refusals=refusals)
            report.verdicts["wrong" if verdict.wrong else verdict.word] += 1
            if verdict.wrong:
                report.broken.append(f"request {number} on {ask.path}: {verdict.word}")

        await asyncio.gather(*(one(number, ask) for number, ask in enumerate(all_asks)))


async def _hear(session: aiohttp.ClientSession, url: str, ask: Ask) -> Heard:
    status, body = 0, b""
    try:
        async with session.post(f"{url}{ask.path}", data=orjson.dumps(ask.body), headers=_JSON) as response:
            status = response.status
            async for piece in response.content.iter_any():
                body += piece
    except aiohttp.ServerTimeoutError:
        raise
    except aiohttp.ClientError:
        return Heard(status, body, whole=False)
    return Heard(status, body, whole=True)


_JSON = {"content-type": "application/json"}


async def _check_rest(lab: Lab, proxy: Proxy, report: Report, rest_seconds: float) -> None:
    """What must hold once nobody asks for anything any more."""
    for engine in lab.engines.values():
        engine.wake()
    deadline = time.monotonic() + rest_seconds
    while (gauges := _gauges(proxy)) or not lab.idle() or lab.ledger.leaked():
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    leaked = lab.ledger.leaked()
    if leaked:
        names = ", ".join(lease.request_id for lease in leaked[:_SHOWN])
        report.broken.append(f"{len(leaked)} leases held {rest_seconds:g} s after the last request: {names}")
    if not lab.idle():
        report.broken.append("engines still work on requests that nobody waits for")
    if lab.ledger.poison:
        first = lab.ledger.poison[0]
        report.broken.append(f"{len(lab.ledger.poison)} POISON: {first.request_id}: {first.why}")
    report.broken += [f"the proxy's gauge {name} is {value:g}" for name, value in gauges.items()]


def _gauges(proxy: Proxy) -> dict[str, float]:
    """The proxy's gauges that ought to be 0 and are not."""
    text = proxy.way.metrics.render().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "gauge" and any(word in family.name for word in _GAUGES) and "seconds" not in family.name:
            for sample in family.samples:
                found[family.name] = found.get(family.name, 0.0) + sample.value
    return {name: value for name, value in found.items() if value}


async def _tasks_left(before: set[asyncio.Task[object]]) -> list[str]:
    """Tasks that a scenario has left, by what they run; some end a turn of the loop later."""
    left: list[str] = []
    for _ in range(50):
        left = [str(task.get_coro()) for task in asyncio.all_tasks() - before]
        if not left:
            break
        await asyncio.sleep(0.01)
    return left


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the kernel hands out: an engine comes back to its own."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)  # noqa: S311
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return list(dict.fromkeys(found)) if len(set(found)) == count else free_ports(count)


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0  # noqa: PTH208


async def campaign(chosen: Sequence[Scenario], seed: int, each: int, verbose: bool = False) -> list[Report]:
    """All scenarios, one after the other; prints what did not hold."""
    # What is opened once and for all is open after the first.
    await run(chosen[0], seed, 1)
    reports = []
    for number, scenario in enumerate(chosen):
        had = descriptors()
        report = await run(scenario, seed, each)
        if descriptors() > had:
            report.broken.append(f"{descriptors() - had} descriptors left")
        reports.append(report)
        if report.broken or verbose:
            counts = ", ".join(f"{count} {word}" for word, count in sorted(report.verdicts.items()))
            print(f"[{number + 1}/{len(chosen)}] {scenario.name}: {counts} ({report.seconds:.1f} s)", flush=True)
        if report.broken:
            for line in report.broken[:_SHOWN]:
                print(f"    {line}")
            if len(report.broken) > _SHOWN:
                print(f"    and {len(report.broken) - _SHOWN} more")
            print(f"    again: python -m baton.sim.chaos --seed {seed} --each {each} --only '{scenario.name}'")
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.sim.chaos",
        description="All faults in all phases against a real proxy in front of the lab.",
        epilog="example: python -m baton.sim.chaos --seed 1 --only 'read/*/decode/reset'",
    )
    parser.add_argument("--seed", type=int, default=1, help="of all chance (default: 1)")
    parser.add_argument("--requests", type=int, default=10_000, help="over all scenarios (default: 10000)")
    parser.add_argument("--each", type=int, help="requests a scenario, in place of --requests")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="scenarios by name, with * and ?"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument("--verbose", action="store_true", help="show those that held, too")
    args = parser.parse_args(argv)
    every = list(scenarios())
    chosen = [each for each in every if not args.only or any(fnmatch.fnmatch(each.name, one) for one in args.only)]
    if not chosen:
        parser.error(f"no scenario is called {' or '.join(args.only)}: see --list")
    if args.list:
        print("\n".join(scenario.name for scenario in chosen))
        return 0
    # What goes wrong on purpose need not be told.
    logging.getLogger("baton").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    each = args.each or -(-args.requests // len(every))
    began = time.monotonic()
    with _runner() as runner:
        reports = runner.run(campaign(chosen, args.seed, each, args.verbose))
    broken = [report for report in reports if report.broken]
    verdicts = sum((report.verdicts for report in reports), Counter[str]())
    counts = ", ".join(f"{count} {word}" for word, count in sorted(verdicts.items()))
    print(
        f"chaos: seed {args.seed}, {len(reports)} scenarios, {sum(verdicts.values())} requests ({counts}) in "
        f"{time.monotonic() - began:.0f} s: {len(broken)} scenarios broken"
    )
    return 1 if broken else 0


def _runner() -> asyncio.Runner:
    with contextlib.suppress(ImportError):
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


if __name__ == "__main__":
    sys.exit(main())
