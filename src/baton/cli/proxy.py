"""`baton proxy`: the front door."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import ValidationError

from baton.cli.parser import Failure, Parser, port_number, seconds
from baton.cluster import Endpoint, Role
from baton.proxy import POLICIES, ProxySettings, serve


def run(words: Sequence[str]) -> int:
    args = _parser().parse_all(words)
    endpoints = (
        *pair(Role.PREFILL, args.prefiller_hosts, args.prefiller_ports, args.prefill),
        *pair(Role.DECODE, args.decoder_hosts, args.decoder_ports, args.decode),
    )
    check_distinct(endpoints, args.host, args.port)
    settings = ProxySettings(
        host=args.host,
        port=args.port,
        endpoints=endpoints,
        policy=args.policy,
        request_timeout_seconds=args.request_timeout_secs,
        probe_interval_seconds=args.health_check_interval_secs,
    )
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    def on_ready(_: object) -> None:
        print(
            f"baton proxy: listening on http://{args.host}:{args.port}, "
            f"{_names(endpoints, Role.PREFILL)} to {_names(endpoints, Role.DECODE)}",
            flush=True,
        )

    allow_descriptors()
    try:
        _run(settings, on_ready)
    except OSError as error:
        raise Failure(
            f"cannot listen on {args.host}:{args.port}: {error.strerror or error}; "
            "stop what has it or choose another --port"
        ) from error
    return 0


def _run(settings: ProxySettings, on_ready: object) -> None:
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(settings, on_ready))  # type: ignore[arg-type]


def allow_descriptors() -> None:
    """Raise the soft limit on open files to the hard one: a stream holds two, and 1,024 is the usual default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> Parser:
    parser = Parser(
        prog="baton proxy",
        description="Takes OpenAI requests, runs prefill, hands the KV cache over, streams the answer of decode.",
        epilog=(
            "examples:\n"
            "  baton proxy --port 8000 --prefiller-ports 8100 --decoder-ports 8200\n"
            "  baton proxy --prefiller-hosts 10.0.1.10 10.0.1.11 --prefiller-ports 8100 --decoder-hosts 10.0.1.20 "
            "--decoder-ports 8200 8201\n"
            "  baton proxy --prefill http://10.0.1.10:8100 --decode http://10.0.1.20:8200"
        ),
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1; 0.0.0.0 for all)")
    parser.add_argument("--port", type=port_number, default=8000, help="(default: 8000)")
    for role, spelling in ((Role.PREFILL, "prefiller"), (Role.DECODE, "decoder")):
        parser.add_argument(
            f"--{spelling}-hosts",
            f"--{spelling}-host",
            nargs="+",
            metavar="HOST",
            help=f"hosts of the {role} servers (default: 127.0.0.1)",
        )
        parser.add_argument(
            f"--{spelling}-ports",
            f"--{spelling}-port",
            nargs="+",
            type=port_number,
            metavar="PORT",
            help="their ports, by position; one port for all hosts or one host for all ports will do "
            f"(default: {8100 if role is Role.PREFILL else 8200})",
        )
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="URL", help=f"a {role} server by URL; repeatable"
        )
    parser.add_argument(
        "--policy",
        default="round_robin",
        choices=sorted(POLICIES),
        help="how an instance is chosen in each pool (default: round_robin)",
    )
    parser.add_argument(
        "--request-timeout-secs",
        type=seconds,
        metavar="S",
        help="limit for one leg of a request (default: none, a long answer takes long)",
    )
    parser.add_argument(
        "--health-check-interval-secs",
        type=seconds,
        default=2.0,
        metavar="S",
        help="between two rounds of health questions (default: 2)",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def pair(role: Role, hosts: list[str] | None, ports: list[int] | None, urls: list[str]) -> list[Endpoint]:
    """Endpoints from lists paired by position, then from URLs.

    Raises:
        Failure: the lists don't pair, or a URL isn't one.
    """
    from_urls = [_from_url(role, url) for url in urls]
    if hosts is None and ports is None and urls:
        return from_urls
    hosts = hosts or ["127.0.0.1"]
    ports = ports or [8100 if role is Role.PREFILL else 8200]
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    elif len(ports) == 1:
        ports = ports * len(hosts)
    if len(hosts) != len(ports):
        raise Failure(
            f"{len(hosts)} {role} hosts ({' '.join(hosts)}) and {len(ports)} ports ({' '.join(map(str, ports))}) don't "
            "pair: give a port for each host, or one for all",
            2,
        )
    paired = [Endpoint(role=role, host=host.strip("[]"), port=port) for host, port in zip(hosts, ports, strict=True)]
    return paired + from_urls


def _from_url(role: Role, url: str) -> Endpoint:
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError
        return Endpoint(role=role, host=parts.hostname, port=parts.port or 80)
    except (ValueError, ValidationError):
        raise Failure(f"--{role} {url!r} is not a URL such as http://host:8100", 2) from None


def check_distinct(endpoints: Sequence[Endpoint], host: str, port: int) -> None:
    """Refuse one server in two places, and the proxy as its own engine."""
    seen: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        if endpoint.authority in seen:
            first = seen[endpoint.authority].role
            raise Failure(f"{endpoint.authority} is named twice, as a {first} and as a {endpoint.role} server", 2)
        seen[endpoint.authority] = endpoint
        if endpoint.port == port and endpoint.host in (host, "127.0.0.1", "localhost", "::1"):
            raise Failure(f"{endpoint.authority} is this proxy's own address, given as a {endpoint.role} server", 2)


def _names(endpoints: Sequence[Endpoint], role: Role) -> str:
    return f"{role} {', '.join(endpoint.authority for endpoint in endpoints if endpoint.role is role)}"
