"""`baton proxy`: the front door."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import resource
import ssl
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.cli.parser import (
    Failure,
    Parser,
    count,
    count_or_zero,
    milliseconds,
    multiplier,
    part,
    port_number,
    seconds,
    user_path,
)
from baton.cluster import Endpoint, Role, TransferMode
from baton.http import Limits
from baton.proxy import (
    MOST_TURNS,
    POLICIES,
    TTL_SECONDS,
    USUAL_PATIENCE,
    BadInstancesFile,
    BreakerRules,
    OnNoTransfer,
    Patience,
    ProbeRules,
    ProxySettings,
    Retries,
    TracingUnavailable,
    is_own,
    read_instances,
    read_keys,
    serve,
    serve_workers,
)

SPARE_DESCRIPTORS = 64
TURNS = ("BATON_BIDIRECTIONAL_KV", "VLLM_NEURON_BIDIRECTIONAL_KV")
OTLP = "http://127.0.0.1:4318/v1/traces"


def run(words: Sequence[str]) -> int:
    args = _parser().parse_all(words)
    filed: dict[Role, tuple[Endpoint, ...]] = {}
    if args.cluster is not None:
        filed, flags = read_cluster(args.cluster)
        # Words that come later win.
        args = _parser().parse_all([*flags, *words])
    endpoints = endpoints_of(args, filed)
    check_distinct(endpoints, args.host, args.port)
    allow_descriptors()
    settings = settings_of(args, endpoints)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    def on_ready(_: object = None) -> None:
        print(
            f"baton proxy: listening on {where(args)}, "
            f"{_names(endpoints, Role.PREFILL)} to {_names(endpoints, Role.DECODE)}"
            + (f", {args.workers} workers" if args.workers > 1 else ""),
            flush=True,
        )

    try:
        if args.workers > 1:
            return serve_workers(settings, args.workers, _run, on_ready)
        _run(serve(settings, on_ready))
    except TracingUnavailable as error:
        raise Failure(f"--enable-trace needs OpenTelemetry, which is not installed: {error}", 2) from error
    except OSError as error:
        if error.filename is not None and str(error.filename) == args.access_log:
            raise Failure(f"--access-log {args.access_log} cannot be written: {error.strerror}") from error
        raise Failure(
            f"cannot listen on {where(args)}: {error.strerror or error}; stop what has it or choose another --port"
        ) from error
    return 0


def endpoints_of(args: argparse.Namespace, filed: Mapping[Role, tuple[Endpoint, ...]]) -> tuple[Endpoint, ...]:
    """The engines: of a file of their own, else of flags, else of the cluster file.

    Raises:
        Failure: the file is no good, or the flags are not.
    """
    if args.instances_file is None:
        return (
            *pair(Role.PREFILL, args.prefiller_hosts, args.prefiller_ports, args.prefill, filed.get(Role.PREFILL, ())),
            *pair(Role.DECODE, args.decoder_hosts, args.decoder_ports, args.decode, filed.get(Role.DECODE, ())),
        )
    named = (
        args.prefiller_hosts,
        args.prefiller_ports,
        args.prefill,
        args.decoder_hosts,
        args.decoder_ports,
        args.decode,
    )
    if any(named):
        raise Failure(
            f"--instances-file {args.instances_file} names the engines: leave the flags that name some out", 2
        )
    try:
        return read_instances(Path(args.instances_file))
    except BadInstancesFile as error:
        raise Failure(f"--instances-file {error}", 2) from error


def read_cluster(path: str) -> tuple[dict[Role, tuple[Endpoint, ...]], list[str]]:
    """The engines that a cluster file names, and what it says of the proxy, as words of the command line.

    Raises:
        Failure: the file is no good.
    """
    # Only here: a proxy that needs no file must not pay for the launcher.
    from baton.launch import ClusterFileError, LaunchError, file_endpoints, proxy_address, read_cluster_file

    try:
        file = read_cluster_file(user_path(path, "--cluster"))
        endpoints = {role: file_endpoints(file, role) for role in Role}
        host = proxy_address(file)
    except ClusterFileError as error:
        raise Failure(str(error), 2, error.others) from error
    except LaunchError as error:
        raise Failure(f"{path}: {error}", 2) from error
    given = (("--host", host), ("--port", file.proxy.port))
    words = [word for name, value in given if value is not None for word in (name, str(value))]
    return endpoints, [*words, *file.proxy.words()]


def where(args: argparse.Namespace) -> str:
    if args.uds:
        return f"unix:{args.uds}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{'https' if args.ssl_certfile else 'http'}://{host}:{args.port}"


def settings_of(args: argparse.Namespace, endpoints: tuple[Endpoint, ...]) -> ProxySettings:
    """What the words ask for.

    Raises:
        Failure: they contradict each other, or a file that they name is no good.
    """
    if args.uds and args.workers > 1:
        raise Failure("--uds and --workers don't go together: workers share a port", 2)
    turns = wants_turns(args)
    limits = Limits(connections=min(args.max_connections, affordable()), body_bytes=args.max_payload_size)
    return ProxySettings(
        host=args.host,
        port=args.port,
        endpoints=endpoints,
        policy=args.policy,
        prefill_policy=args.prefill_policy,
        decode_policy=args.decode_policy,
        transfer_mode=None if args.transfer_mode == "auto" else TransferMode(args.transfer_mode),
        request_timeout_seconds=args.request_timeout_secs,
        patience=Patience(args.prefill_timeout_secs or math.inf, args.decode_timeout_secs or math.inf),
        retries=retries_of(args),
        ticket_max_age_seconds=args.ticket_max_age_secs,
        probe_interval_seconds=args.health_check_interval_secs,
        probe_timeout_seconds=args.health_check_timeout_secs,
        probe_failures=args.health_failure_threshold,
        probe_successes=args.health_success_threshold,
        probe_path=args.health_check_endpoint,
        breaker=BreakerRules(
            args.cb_failure_threshold,
            args.cb_success_threshold,
            args.cb_timeout_duration_secs,
            args.cb_window_duration_secs,
            enabled=not args.disable_circuit_breaker,
        ),
        instances_file=args.instances_file,
        shutdown_seconds=args.shutdown_grace_period_secs,
        limits=limits,
        uds=args.uds,
        tls=server_tls(args.ssl_certfile, args.ssl_keyfile),
        engine_tls=engine_tls(args.engine_ca_file)
        if args.engine_ca_file or any(each.tls for each in endpoints)
        else None,
        api_keys=api_keys(args.api_key, args.api_key_file),
        admin_key=args.admin_key or os.environ.get("BATON_ADMIN_KEY"),
        engine_api_key=args.engine_api_key or os.environ.get("BATON_ENGINE_API_KEY"),
        cors_origins=tuple(args.cors_allowed_origins),
        max_requests=args.max_concurrent_requests or None,
        max_decode_requests=args.max_decode_requests or None,
        queue_size=args.queue_size,
        queue_seconds=args.queue_timeout_secs,
        keep_alive_seconds=args.sse_keepalive_secs,
        request_id_headers=tuple(args.request_id_headers),
        name_instances=not args.hide_instances,
        access_log=args.access_log,
        warm_up=args.warm_up,
        warm_up_seconds=args.warm_up_timeout_secs,
        on_no_transfer=None if args.on_no_transfer is None else OnNoTransfer(args.on_no_transfer),
        scrape_seconds=args.transfer_metrics_interval_secs,
        otlp_endpoint=traces_url(args.otlp_traces_endpoint or OTLP) if args.enable_trace else None,
        turns=turns,
        turn_ttl_seconds=args.turn_ttl_seconds,
        max_turns=args.max_turns,
        client_tickets=args.client_tickets,
    )


def retries_of(args: argparse.Namespace) -> Retries:
    """How often a request is tried again.

    Raises:
        Failure: the longest wait is shorter than the first.
    """
    if args.retry_max_backoff_ms < args.retry_initial_backoff_ms:
        raise Failure(
            f"--retry-max-backoff-ms {args.retry_max_backoff_ms:g} is less than --retry-initial-backoff-ms "
            f"{args.retry_initial_backoff_ms:g}: it is the limit of what that one grows to",
            2,
        )
    return Retries(
        0 if args.disable_retries else args.retry_max_retries,
        args.retry_initial_backoff_ms / 1000,
        args.retry_max_backoff_ms / 1000,
        args.retry_backoff_multiplier,
        args.retry_jitter_factor,
    )


def wants_turns(args: argparse.Namespace) -> bool:
    """Whether the KV cache of an answer is kept for the next request: by flag, else by environment.

    Raises:
        Failure: that contradicts something else.
    """
    asked: str | None = None
    if args.turns is None:
        asked = next((f"{name}={os.environ[name]}" for name in TURNS if switched_on(name)), None)
        asked = "--client-tickets" if args.client_tickets else asked
    elif args.turns:
        asked = "--turns"
    elif args.client_tickets:
        raise Failure("--client-tickets and --no-turns contradict each other: a client's ticket is for a turn", 2)
    if asked is not None and args.workers > 1:
        raise Failure(
            f"{asked} and --workers {args.workers} don't go together: each worker would know its own conversations "
            "only; use --workers 1 or --no-turns",
            2,
        )
    return asked is not None


def switched_on(name: str) -> bool:
    """Whether a variable of the environment is 1.

    Raises:
        Failure: it is neither that nor 0.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise Failure(f"{name}={value}: 1 turns it on, 0 off", 2)
    return value == "1"


def api_keys(given: Sequence[str], path: str | None) -> tuple[str, ...]:
    """The keys of clients: from flags, else from a file, else from the environment.

    Raises:
        Failure: the file is no good.
    """
    if path is not None:
        try:
            return (*given, *read_keys(Path(path)))
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise Failure(f"--api-key-file {path}: {said}; it holds one key a line", 2) from error
    return tuple(given) or tuple(filter(None, [os.environ.get("BATON_API_KEY")]))


def server_tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """TLS for clients.

    Raises:
        Failure: the certificate or its key is no good.
    """
    if certfile is None:
        if keyfile is not None:
            raise Failure("--ssl-keyfile needs --ssl-certfile", 2)
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise Failure(f"--ssl-certfile {certfile}: {error.strerror or error}; PEM files are wanted", 2) from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def engine_tls(ca_file: str | None) -> ssl.SSLContext:
    """TLS for engines.

    Raises:
        Failure: the file of certificates is no good.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise Failure(f"--engine-ca-file {ca_file}: {error.strerror or error}; a PEM file is wanted", 2) from error


def traces_url(endpoint: str) -> str:
    """OTLP over HTTP at a URL, or at ``host:port`` with the usual path."""
    return endpoint if "://" in endpoint else f"http://{endpoint}/v1/traces"


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


def allow_descriptors() -> None:
    """Raise the soft limit on open files to the hard one: a stream holds two, and 1,024 is the usual default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable() -> int:
    """Clients' connections that the limit on open files allows: each may need one to an engine, and some are kept.

    Beyond it a client is told so; without it the next file, whatever it is for, could not be opened.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - SPARE_DESCRIPTORS) // 2, 1)


def _parser() -> Parser:
    parser = Parser(
        prog="baton proxy",
        description="Takes OpenAI requests, runs prefill, hands the KV cache over, streams the answer of decode.",
        epilog=(
            "examples:\n"
            "  baton proxy --port 8000 --prefiller-ports 8100 --decoder-ports 8200\n"
            "  baton proxy --prefiller-hosts 10.0.1.10 10.0.1.11 --prefiller-ports 8100 --decoder-hosts 10.0.1.20 "
            "--decoder-ports 8200 8201\n"
            "  baton proxy --prefill http://10.0.1.10:8100 --decode http://10.0.1.20:8200 --api-key-file keys.txt\n"
            "  baton proxy --cluster examples/2p3d.yaml"
        ),
    )
    _engines(parser)
    _retries(parser)
    _health(parser)
    _listening(parser)
    _keys(parser)
    _load(parser)
    _turns(parser)
    _watching(parser)
    return parser


def _engines(parser: Parser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument(
        "-f",
        "--cluster",
        metavar="FILE",
        help="the engines and the proxy's own flags, in YAML or JSON, as for baton up; flags win over it",
    )
    for role, spelling in ((Role.PREFILL, "prefiller"), (Role.DECODE, "decoder")):
        group.add_argument(
            f"--{spelling}-hosts",
            f"--{spelling}-host",
            nargs="+",
            metavar="HOST",
            help=f"hosts of the {role} servers (default: 127.0.0.1)",
        )
        group.add_argument(
            f"--{spelling}-ports",
            f"--{spelling}-port",
            nargs="+",
            type=port_number,
            metavar="PORT",
            help="their ports, by position; one port for all hosts or one host for all ports will do "
            f"(default: {8100 if role is Role.PREFILL else 8200})",
        )
        group.add_argument(
            f"--{role}", action="append", default=[], metavar="URL", help=f"a {role} server by URL; repeatable"
        )
    group.add_argument(
        "--instances-file",
        metavar="FILE",
        help="the engines alone, a list of {role, url} in YAML or JSON, in place of flags; read again when it changes, "
        "and on SIGHUP",
    )
    names = sorted(POLICIES)
    group.add_argument(
        "--policy",
        default="round_robin",
        choices=names,
        help="how an instance is chosen in each pool (default: round_robin)",
    )
    group.add_argument("--prefill-policy", choices=names, help="the same among prefill servers only")
    group.add_argument("--decode-policy", choices=names, help="the same among decode servers only")
    group.add_argument(
        "--transfer-mode",
        default="auto",
        choices=["auto", *map(str, TransferMode)],
        help="what the engines must be: read, the decode servers pull; write, the prefill servers push "
        "(default: auto, they are asked)",
    )
    group.add_argument(
        "--request-timeout-secs",
        type=seconds,
        metavar="S",
        help="limit for a request, from its arrival to the last byte of its answer: the line, every attempt, both "
        "legs, and the stream (default: none, a long answer takes long)",
    )
    for role, words, usual in (
        (Role.PREFILL, "in line and while it computes the prompt", USUAL_PATIENCE.prefill),
        (
            Role.DECODE,
            "until its first token and between two of them; of an answer in one piece, all of it",
            USUAL_PATIENCE.decode,
        ),
    ):
        group.add_argument(
            f"--{role}-timeout-secs",
            type=count_or_zero,
            default=usual,
            metavar="S",
            help=f"how long a {role} server may say nothing to a request, {words}; then another is asked "
            f"(default: {usual:g}; 0: for ever)",
        )
    group.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one small hand-off for each pair before /health is good, so that no request waits for a handshake "
        "(default: --warm-up)",
    )
    group.add_argument(
        "--warm-up-timeout-secs", type=seconds, default=30.0, metavar="S", help="limit for one pair (default: 30)"
    )
    group.add_argument(
        "--on-no-transfer",
        choices=list(map(str, OnNoTransfer)),
        help="when no KV cache is transferred: fail, not ready, and requests without a ticket are 503; fallback, the "
        "decode server computes the prompt; warn, that and said (default: fail until ready once, then warn)",
    )
    group.add_argument(
        "--transfer-metrics-interval-secs",
        type=count_or_zero,
        default=10.0,
        metavar="S",
        help="between two looks at what engines count of their transfers, for /metrics (default: 10; 0: never)",
    )
    group.add_argument("--engine-ca-file", metavar="PEM", help="who vouches for engines at https URLs")


def path_word(word: str) -> str:
    """A path on a server, as an argument."""
    if not word.startswith("/") or not word.isascii() or not word.isprintable() or " " in word:
        raise argparse.ArgumentTypeError(f"{word!r} is not a path such as /health")
    return word


def _health(parser: Parser) -> None:
    group = parser.add_argument_group("health", "Who is out gets no requests; a 4xx never counts against an engine.")
    group.add_argument(
        "--health-check-interval-secs",
        type=seconds,
        default=ProbeRules.interval_seconds,
        metavar="S",
        help=f"between two probes of an engine (default: {ProbeRules.interval_seconds:g})",
    )
    group.add_argument(
        "--health-check-timeout-secs",
        type=seconds,
        default=ProbeRules.timeout_seconds,
        metavar="S",
        help=f"for one probe (default: {ProbeRules.timeout_seconds:g})",
    )
    group.add_argument(
        "--health-failure-threshold",
        type=count,
        default=ProbeRules.failures,
        metavar="N",
        help=f"bad probes in a row that take an engine out; a refused connection does at once (default: "
        f"{ProbeRules.failures})",
    )
    group.add_argument(
        "--health-success-threshold",
        type=count,
        default=ProbeRules.successes,
        metavar="N",
        help=f"good probes in a row that take it in again (default: {ProbeRules.successes})",
    )
    group.add_argument(
        "--health-check-endpoint",
        type=path_word,
        default="/health",
        metavar="PATH",
        help="what is asked for; 200 is good (default: /health)",
    )
    group.add_argument(
        "--cb-failure-threshold",
        type=count,
        default=BreakerRules.failures,
        metavar="N",
        help=f"failed requests in a row that take an engine out (default: {BreakerRules.failures})",
    )
    group.add_argument(
        "--cb-success-threshold",
        type=count,
        default=BreakerRules.successes,
        metavar="N",
        help=f"good trials in a row that take it in again (default: {BreakerRules.successes})",
    )
    group.add_argument(
        "--cb-timeout-duration-secs",
        type=seconds,
        default=BreakerRules.open_seconds,
        metavar="S",
        help=f"until the first trial, and between trials (default: {BreakerRules.open_seconds:g})",
    )
    group.add_argument(
        "--cb-window-duration-secs",
        type=seconds,
        default=BreakerRules.window_seconds,
        metavar="S",
        help=f"failed requests further apart are not in a row (default: {BreakerRules.window_seconds:g})",
    )
    group.add_argument(
        "--disable-circuit-breaker", action="store_true", help="only probes and refused connections take an engine out"
    )


def _retries(parser: Parser) -> None:
    usual = Retries()
    group = parser.add_argument_group(
        "trying again",
        "A request that an engine failed, by anything but a refusal of the request, goes to another at once; to the "
        "same one only when there is no other, after a wait. Never when its client has heard a part of the answer.",
    )
    group.add_argument(
        "--retry-max-retries",
        type=count_or_zero,
        default=usual.most,
        metavar="N",
        help=f"attempts after the first (default: {usual.most})",
    )
    group.add_argument(
        "--retry-initial-backoff-ms",
        type=milliseconds,
        default=usual.initial_seconds * 1000,
        metavar="MS",
        help=f"the first wait (default: {usual.initial_seconds * 1000:g})",
    )
    group.add_argument(
        "--retry-max-backoff-ms",
        type=milliseconds,
        default=usual.max_seconds * 1000,
        metavar="MS",
        help=f"the longest (default: {usual.max_seconds * 1000:g})",
    )
    group.add_argument(
        "--retry-backoff-multiplier",
        type=multiplier,
        default=usual.multiplier,
        metavar="X",
        help=f"how much longer each is than the one before (default: {usual.multiplier:g})",
    )
    group.add_argument(
        "--retry-jitter-factor",
        type=part,
        default=usual.jitter,
        metavar="X",
        help=f"by which part of itself a wait is longer or shorter, at random (default: {usual.jitter:g})",
    )
    group.add_argument("--disable-retries", action="store_true", help="the same as --retry-max-retries 0")
    group.add_argument(
        "--ticket-max-age-secs",
        type=seconds,
        metavar="S",
        help="a ticket older than this is not used, its prompt is computed again (default: two thirds of the prefill "
        "server's lease)",
    )


def _listening(parser: Parser) -> None:
    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1; 0.0.0.0 for all)")
    group.add_argument("--port", type=port_number, default=8000, help="(default: 8000)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket in place of host and port")
    group.add_argument("--ssl-certfile", metavar="PEM", help="serve https with this certificate chain")
    group.add_argument("--ssl-keyfile", metavar="PEM", help="its private key, when it is in a file of its own")
    group.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="processes that share the port; their metrics add up (default: 1)",
    )
    group.add_argument(
        "--shutdown-grace-period-secs",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long open requests may go on after a stop was asked for (default: 30)",
    )


def _keys(parser: Parser) -> None:
    group = parser.add_argument_group(
        "keys and origins", "A key in the environment does not show in a list of processes."
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ask clients for this key; repeatable (environment: BATON_API_KEY)",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the same for each line of a file")
    group.add_argument(
        "--admin-key", metavar="KEY", help="ask for this key at /instances (environment: BATON_ADMIN_KEY)"
    )
    group.add_argument(
        "--engine-api-key",
        metavar="KEY",
        help="what engines ask for; given to them when the client brings no key, or one of --api-key "
        "(environment: BATON_ENGINE_API_KEY)",
    )
    group.add_argument(
        "--cors-allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web origins whose pages may call, such as https://chat.example; * for all (default: none)",
    )


def _load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--max-concurrent-requests",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="requests under way at once; more wait in line (default: 0, no limit)",
    )
    group.add_argument(
        "--max-decode-requests",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="the same at each decode server, those included that are still in prefill: what it could not take would "
        "pin blocks at its prefill server while it waits there (default: 0, no limit)",
    )
    group.add_argument(
        "--queue-size",
        type=count_or_zero,
        default=100,
        metavar="N",
        help="requests that may wait; one more is 429 (default: 100)",
    )
    group.add_argument(
        "--queue-timeout-secs", type=seconds, default=60.0, metavar="S", help="how long one may wait (default: 60)"
    )
    group.add_argument(
        "--max-connections",
        type=count,
        default=Limits.connections,
        metavar="N",
        help=f"clients' connections at once; more are 503 (default: {Limits.connections})",
    )
    group.add_argument(
        "--max-payload-size",
        type=count,
        default=Limits.body_bytes,
        metavar="BYTES",
        help=f"of one request; more is 413 (default: {Limits.body_bytes})",
    )
    group.add_argument(
        "--sse-keepalive-secs",
        type=seconds,
        metavar="S",
        help="send a comment in a stream after so much silence, also before the engines have answered: "
        "an error that comes later is then an event of a stream with status 200 (default: never)",
    )


def _turns(parser: Parser) -> None:
    group = parser.add_argument_group(
        "conversations",
        "A request says which it belongs to by X-Session-ID, or conversation_id in its body. Decode servers must be "
        "started for it too.",
    )
    group.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        help="bidirectional KV: the next prefill of a conversation pulls what its decode server has "
        f"(default: off; environment: {TURNS[0]}=1 or {TURNS[1]}=1)",
    )
    group.add_argument(
        "--turn-ttl-seconds",
        type=seconds,
        default=TTL_SECONDS,
        metavar="S",
        help="how long after an answer; some time less than decode servers keep their blocks, which is 480 s "
        f"(default: {TTL_SECONDS:g})",
    )
    group.add_argument(
        "--max-turns",
        type=count,
        default=MOST_TURNS,
        metavar="N",
        help=f"at a time; the least recently kept goes first (default: {MOST_TURNS})",
    )
    group.add_argument(
        "--client-tickets",
        action="store_true",
        help="turns --turns on, and gives clients a ticket with each answer that they may echo in the next request",
    )


def _watching(parser: Parser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    group.add_argument("--access-log", metavar="FILE", help="a line a request to this file, or - (default: none)")
    group.add_argument(
        "--request-id-headers",
        nargs="+",
        default=["x-request-id"],
        metavar="NAME",
        help="where a client's own id may stand; it gets it back (default: x-request-id)",
    )
    group.add_argument(
        "--hide-instances", action="store_true", help="leave x-baton-prefill and x-baton-decode out of answers"
    )
    group.add_argument("--enable-trace", action="store_true", help="send OpenTelemetry spans")
    group.add_argument("--otlp-traces-endpoint", metavar="URL", help=f"where to, by OTLP over HTTP (default: {OTLP})")


def pair(
    role: Role,
    hosts: list[str] | None,
    ports: list[int] | None,
    urls: list[str],
    filed: Sequence[Endpoint] = (),
) -> list[Endpoint]:
    """Endpoints from lists paired by position, then from URLs; without any, those of a cluster file.

    Raises:
        Failure: the lists don't pair, or a URL isn't one.
    """
    from_urls = [_from_url(role, url) for url in urls]
    if hosts is None and ports is None and urls:
        return from_urls
    if hosts is None and ports is None and filed:
        return list(filed)
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
        return Endpoint.from_url(role, url)
    except ValueError as error:
        raise Failure(f"--{role} {error}", 2) from None


def check_distinct(endpoints: Sequence[Endpoint], host: str, port: int) -> None:
    """Refuse one server in two places, and the proxy as its own engine."""
    seen: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        if endpoint.authority in seen:
            first = seen[endpoint.authority].role
            raise Failure(f"{endpoint.authority} is named twice, as a {first} and as a {endpoint.role} server", 2)
        seen[endpoint.authority] = endpoint
        if is_own(endpoint, host, port):
            raise Failure(f"{endpoint.authority} is this proxy's own address, given as a {endpoint.role} server", 2)


def _names(endpoints: Sequence[Endpoint], role: Role) -> str:
    return f"{role} {', '.join(endpoint.authority for endpoint in endpoints if endpoint.role is role)}"
