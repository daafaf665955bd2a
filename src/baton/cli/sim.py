"""`baton sim`: the lab, fake engines for tests, benchmarks and planning without accelerators."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from baton.cli.parser import Failure, Parser, count, count_or_zero, port_number, seconds
from baton.cluster import Role, TransferMode
from baton.proxy import ProxySettings, serve
from baton.sim import BadFault, EngineSettings, Fault, Kind, Lab, Unreachable, campaign, compare, specs

FIRST_PORT = {Role.PREFILL: 8100, Role.DECODE: 8200}
PROXY_PORT = 8000
MOST_DECODE = FIRST_PORT[Role.DECODE] - FIRST_PORT[Role.PREFILL]


def run(words: Sequence[str]) -> int:
    args = _parser().parse_all(words)
    if args.check_against:
        return _check(args)
    if args.chaos:
        return campaign(["--seed", str(args.seed)])
    try:
        faults = [Fault.parse(spec) for spec in args.fault]
    except BadFault as error:
        raise Failure(f"--fault: {error}", 2) from error
    lab = Lab(specs(args.prefill, args.decode, settings_of(args), ports_of(args)), args.host, args.seed)
    _run(_serve(lab, faults, args))
    return 0


def settings_of(args: argparse.Namespace) -> EngineSettings:
    """What the words say of the engines."""
    return EngineSettings(
        model=args.model,
        mode=TransferMode(args.mode),
        block_size=args.block_size,
        kv_blocks=args.kv_blocks,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        prefill_tokens_per_second=args.prefill_tokens_per_second,
        decode_step_seconds=args.decode_step_ms / 1000,
        lease_seconds=args.lease_seconds,
        transfer_bytes_per_second=args.transfer_bytes_per_second,
        token_bytes=args.token_bytes,
        handshake_seconds=args.handshake_seconds,
        prefix_cache=args.prefix_cache,
        bidirectional=args.bidirectional_kv,
        connector=not args.no_connector,
        dp_size=args.data_parallel_size,
        baton=not args.stock,
    )


def ports_of(args: argparse.Namespace) -> list[int]:
    """The engines' ports: from --port on, one after the other, else from 8100 and from 8200 on.

    Raises:
        Failure: there are not as many.
    """
    total = args.prefill + args.decode
    if args.port == 0:
        return [0] * total
    if args.port is None:
        if args.prefill > MOST_DECODE:
            raise Failure(f"--prefill {args.prefill}: more than {MOST_DECODE} need --port, for all in one row", 2)
        first, second = FIRST_PORT[Role.PREFILL], FIRST_PORT[Role.DECODE]
        ports = [*range(first, first + args.prefill), *range(second, second + args.decode)]
    else:
        ports = list(range(args.port, args.port + total))
    if ports[-1] > 65535:
        raise Failure(f"{total} engines from port {ports[0]} on end beyond port 65535: choose a lower --port", 2)
    return ports


async def _serve(lab: Lab, faults: Sequence[Fault], args: argparse.Namespace) -> None:
    """Run the lab, with a proxy when one is wanted, until SIGINT or SIGTERM."""
    try:
        await lab.start()
    except OSError as error:
        raise Failure(
            f"an engine cannot listen: {error.strerror or error}; stop what has the port or choose another --port"
        ) from error
    try:
        await lab.set_faults(faults)
    except BadFault as error:
        await lab.stop()
        raise Failure(f"--fault: {error}", 2) from error
    try:
        if args.proxy:
            await _front(lab, args)
        else:
            show(lab, args, None)
            await _stopped()
    except OSError as error:
        raise Failure(
            f"the proxy cannot listen on port {args.proxy_port}: {error.strerror or error}; choose another --proxy-port"
        ) from error
    finally:
        await lab.stop()


async def _front(lab: Lab, args: argparse.Namespace) -> None:
    settings = ProxySettings(
        host=args.host,
        port=args.proxy_port,
        endpoints=lab.endpoints,
        transfer_mode=TransferMode(args.mode),
        turns=args.bidirectional_kv,
        shutdown_seconds=1.0,
    )
    await serve(settings, lambda addresses: show(lab, args, addresses[0]))


async def _stopped() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def show(lab: Lab, args: argparse.Namespace, proxy: tuple[str, int] | None) -> None:
    """Say where everything is."""
    front = None if proxy is None else f"http://{proxy[0]}:{proxy[1]}"
    words = [word for role in Role for engine in lab.of(role) for word in (f"--{role}", engine.url)]
    if args.json:
        engines = [
            {"name": engine.name, "role": str(engine.spec.role), "url": engine.url, "engine_id": engine.engine_id}
            for engine in lab.engines.values()
        ]
        print(json.dumps({"engines": engines, "proxy": front}), flush=True)
        return
    for role in Role:
        urls = [engine.url for engine in lab.of(role)]
        few = urls if len(urls) <= 8 else [*urls[:3], "...", urls[-1]]
        print(f"baton sim: {role:<8}{' '.join(few)}")
    first = next(iter(lab.engines.values())).url
    if front is not None:
        print(f"baton sim: proxy   {front}")
    elif len(words) <= 16:
        print(f"in front of them: baton proxy {' '.join(words)}")
    print(f"the ledger: {first}/sim/ledger   faults: {first}/sim/faults", flush=True)


def _check(args: argparse.Namespace) -> int:
    """Compare the fake with real engines; exit code 1 when it differs in what is not known."""
    prefill, decode = args.check_against
    try:
        found = _run(compare(prefill, decode))
    except Unreachable as error:
        raise Failure(str(error)) from error
    if args.json:
        print(json.dumps([difference.as_dict() for difference in found]))
    else:
        for difference in found:
            print(difference)
        print(f"baton sim: {len(found)} differences, {sum(not each.known for each in found)} of them not known")
    return 1 if any(not difference.known for difference in found) else 0


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    factory = None
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _parser() -> Parser:
    parser = Parser(
        prog="baton sim",
        description="Fake engines that hold leases, expire, restart and break as real ones do: for tests, benchmarks\n"
        "and planning without accelerators. Their answers are made from what is in the KV blocks: a wrong block gives\n"
        "a wrong text, and an entry POISON in the ledger (GET /sim/ledger at any of them).",
        epilog="examples:\n"
        "  baton sim --proxy\n"
        "  baton sim --prefill 2 --decode 2 --decode-step-ms 20 --fault 'status=503,engine=D1,count=3'\n"
        "  baton sim --check-against http://127.0.0.1:8100 http://127.0.0.1:8200",
    )
    parser.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill servers (default: 1)")
    parser.add_argument("--decode", type=count, default=1, metavar="N", help="decode servers (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="where all listen (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=lambda text: 0 if text == "0" else port_number(text),
        help="of the first engine, the others follow, 0 for any (default: 8100 for prefill, 8200 for decode)",
    )
    parser.add_argument(
        "--mode",
        "--transfer-mode",
        choices=[str(mode) for mode in TransferMode],
        default="read",
        help="who moves the KV cache (default: read)",
    )
    parser.add_argument("--proxy", action="store_true", help="start Baton's proxy before them")
    parser.add_argument("--proxy-port", type=port_number, default=PROXY_PORT, metavar="PORT", help="(default: 8000)")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--model", default="sim", help="the name of the model that they serve (default: sim)")
    engines.add_argument("--block-size", type=count, default=32, metavar="TOKENS", help="of a KV block (default: 32)")
    engines.add_argument("--kv-blocks", type=count, default=100_000, metavar="N", help="a rank has (default: 100000)")
    engines.add_argument(
        "--max-num-seqs", type=count, default=256, metavar="N", help="requests at a time, more wait (default: 256)"
    )
    engines.add_argument("--max-model-len", type=count, default=32_768, metavar="TOKENS", help="(default: 32768)")
    engines.add_argument("--data-parallel-size", type=count, default=1, metavar="N", help="ranks (default: 1)")
    engines.add_argument("--prefix-cache", action="store_true", help="a prompt's known start costs no time")
    engines.add_argument("--bidirectional-kv", action="store_true", help="decode servers keep turns")
    engines.add_argument("--no-connector", action="store_true", help="they know no tickets")
    engines.add_argument("--stock", action="store_true", help="as vLLM is without Baton: no /baton/engine")
    speeds = parser.add_argument_group("speeds (default: everything at once)")
    speeds.add_argument(
        "--prefill-tokens-per-second",
        type=_rate,
        default=float("inf"),
        metavar="N",
        help="one prompt after the other",
    )
    speeds.add_argument(
        "--decode-step-ms", type=_zero_or_more, default=0.0, metavar="MS", help="a token of each request"
    )
    speeds.add_argument("--transfer-bytes-per-second", type=_rate, default=float("inf"), metavar="N", help="of a pull")
    speeds.add_argument("--token-bytes", type=count, default=46_080, metavar="N", help="KV cache (default: 46080)")
    speeds.add_argument(
        "--handshake-seconds", type=_zero_or_more, default=0.0, metavar="S", help="of the first transfer of a pair"
    )
    speeds.add_argument(
        "--lease-seconds", type=seconds, default=30.0, metavar="S", help="blocks wait for their reader (default: 30)"
    )
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="KIND[=VALUE][,engine=P0][,phase=prefill|decode|plain|probe][,count=N][,p=0.1][,after=N]; kinds: "
        + " ".join(Kind)
        + " (docs/lab.md)",
    )
    faults.add_argument("--seed", type=count_or_zero, default=0, metavar="N", help="of faults by chance (default: 0)")
    parser.add_argument("--json", action="store_true", help="print addresses, or differences, as JSON")
    parser.add_argument(
        "--check-against", nargs=2, metavar=("P", "D"), help="compare with real engines at these URLs, and end"
    )
    parser.add_argument("--chaos", action="store_true", help="run the campaign of faults, and end")
    return parser


def _rate(text: str) -> float:
    """An argparse type: a number above 0, ``inf`` among them."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _zero_or_more(text: str) -> float:
    """An argparse type: a number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value
