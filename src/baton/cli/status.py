"""`baton status`: what a cluster is doing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from baton.cli.parser import Failure, Parser
from baton.cli.running import add_name, the_cluster
from baton.launch import ProxyClient, ProxyRefused, observe, observe_proxy

WATCH_SECONDS = 1.0
WIDE = 200
"""Columns for what no terminal shows."""
_GOOD = frozenset({"ready", "usable", "running", "closed"})


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton status",
        description="What each process is doing, its load, and what has moved between them. Exit code 1 when "
        "something is not well.",
        epilog="examples:\n  baton status\n  baton status --watch\n  baton status --proxy http://10.0.0.1:8000 --json",
    )
    add_name(parser)
    parser.add_argument("--proxy", metavar="URL", help="of a fleet that was not started here: ask its proxy alone")
    parser.add_argument(
        "--admin-key", metavar="KEY", help="that the proxy asks for (environment: BATON_ADMIN_KEY); with --proxy"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    args = parser.parse_all(words)
    if args.admin_key and not args.proxy:
        raise Failure("--admin-key goes with --proxy: the keys of a cluster that was started here are known", 2)
    key = args.admin_key or os.environ.get("BATON_ADMIN_KEY")

    def look() -> dict[str, Any]:
        try:
            if args.proxy:
                return asyncio.run(observe_proxy(ProxyClient(args.proxy.rstrip("/"), key)))
            return asyncio.run(observe(the_cluster(args.name), os.environ))
        except ProxyRefused as error:
            raise Failure(str(error)) from error

    if args.watch:
        return _watch(look, as_json=args.json)
    seen = look()
    if args.json:
        print(orjson.dumps(seen).decode())
    else:
        console().print(shown(seen))
    return 0 if well(seen) else 1


def _watch(look: Any, *, as_json: bool) -> int:
    before: dict[str, Any] | None = None
    at = time.monotonic()
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            seen, now = look(), time.monotonic()
            if as_json:
                print(orjson.dumps(seen).decode(), flush=True)
            else:
                live.update(shown(seen, before, now - at), refresh=True)
            before, at = seen, now
            time.sleep(WATCH_SECONDS)


def console() -> Console:
    """The terminal; what goes elsewhere is as wide as it wants to be."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


def well(seen: Mapping[str, Any]) -> bool:
    """Whether every process does what it should."""
    supervisor = seen.get("supervisor")
    return (
        seen["proxy_answers"]
        and (supervisor is None or supervisor["running"])
        and all(row["state"] in _GOOD and (row["proxy"] or {}).get("usable", True) for row in seen["processes"])
    )


def shown(seen: Mapping[str, Any], before: Mapping[str, Any] | None = None, seconds: float = 0.0) -> Table:
    """The same as a table; with what was seen *seconds* ago, also how fast KV caches move."""
    title = f"{seen['name']}: {seen['model']} at {seen['proxy']}" if seen["name"] else f"the fleet of {seen['proxy']}"
    title = escape(title)
    supervisor = seen.get("supervisor")
    if supervisor is not None and not supervisor["running"]:
        title += "\n[red]the supervisor is gone: `baton up` takes over what still runs, `baton down` ends it[/]"
    if not seen["proxy_answers"]:
        title += "\n[red]the proxy does not answer[/]"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("id", "state", "url"):
        table.add_column(head, no_wrap=head != "state")
    for head in ("pid", "up", "starts", "in flight", "tickets", "running", "waiting", "KV use", "KV moved", "vLLM"):
        table.add_column(head, justify="right", no_wrap=True)
    moved, failures = _moved(before), list[str]()
    for row in seen["processes"]:
        routed, engine = row["proxy"] or {}, row["engine"] or {}
        state = row["state"]
        if routed and not routed.get("usable", True) and state in _GOOD:
            state = f"{state}, out"
        style = "green" if state in _GOOD else "red" if state in {"gone", "stopped"} else "yellow"
        rate = (engine.get("bytes_moved", 0.0) - moved[row["id"]]) / seconds if row["id"] in moved and seconds else None
        table.add_row(
            row["id"],
            f"[{style}]{state}[/]",
            escape(row["url"]),
            _text(row.get("pid")),
            _duration(row.get("seconds")),
            _text(row.get("boots")),
            _text(routed.get("in_flight")),
            _text(routed.get("held")),
            _text(engine.get("running")),
            _text(engine.get("waiting")),
            "-" if "kv_cache_usage" not in engine else f"{engine['kv_cache_usage']:.0%}",
            _bytes(engine.get("bytes_moved")) + ("" if rate is None else f" ({_bytes(rate)}/s)"),
            _text(engine.get("version")),
        )
        if row.get("last_failure"):
            said = row["last_failure"]
            said = said if said.startswith(row["id"]) else f"{row['id']}: {said}"
            failures.append(f"[yellow]{escape(said)}[/]")
    if failures:
        table.caption, table.caption_justify = "\n".join(failures), "left"
    return table


def _moved(seen: Mapping[str, Any] | None) -> dict[str, float]:
    rows = [] if seen is None else seen["processes"]
    return {row["id"]: (row["engine"] or {}).get("bytes_moved", 0.0) for row in rows}


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
