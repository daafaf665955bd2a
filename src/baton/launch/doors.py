"""Flags that would have a planned server listen where nobody looks for it, each with what to use instead. Pure.

Whoever starts a server by hand (`baton engine`, `baton proxy`) may put it where he likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.cluster import Cluster
from baton.launch.errors import LaunchError

_TLS = (
    "`baton up` speaks http to what it starts; leave it out, and put what ends TLS before the proxy, "
    "or start servers with TLS by hand (`baton engine`, `baton proxy`)"
)
_TCP = "it listens on a port; leave it out"
_ENGINE = {
    "--host": "use the key host, or --host of `baton up`",
    "--port": "use the key port, or --prefill-port and --decode-port",
    "--uds": _TCP,
    "--headless": "it must answer at its API; start a headless engine by hand, with `baton engine`",
    "--grpc": "it must answer over HTTP; leave it out",
    "--ssl": _TLS,
}
"""What moves the API of `vllm serve` (vllm 0.32, entrypoints/cli/serve.py)."""
_LISTED = "the engines of a plan are those under prefill and decode; list them there"
_PROXY = {
    "--host": "use the key proxy.host, or --host of `baton up`",
    "--port": "use the key proxy.port, or --port of `baton up`",
    "--uds": _TCP,
    "--ssl": _TLS,
    **dict.fromkeys(("--cluster", "-f", "--instances-file", "--prefill", "--decode"), _LISTED),
    **{f"--{role}-{what}": _LISTED for role in ("prefiller", "decoder") for what in ("host", "hosts", "port", "ports")},
}
_ALL_ADDRESSES = ("0.0.0.0", "::")
_SHORTEST = len("--ho")
"""vLLM's parser takes a beginning for the whole name; no flag of its own is one of those above cut to this or more."""


def check_doors(cluster: Cluster) -> None:
    """See that every server of *cluster* will listen where it is planned.

    A flag that says the same again does no harm, nor all addresses for one of them.

    Raises:
        LaunchError: one would not; the message names it, the flag and the remedy.
    """
    places = [("the proxy", cluster.proxy_host, cluster.proxy_port, cluster.proxy_flags, _PROXY)]
    places += [(each.id, each.host, each.port, each.engine_args, _ENGINE) for each in cluster.instances]
    for name, host, port, args, moving in places:
        same = {"--host": (host, *_ALL_ADDRESSES), "--port": (str(port),)}
        for flag, value, remedy in _found(args, moving):
            if value not in same.get(flag, ()):
                said = f"{flag} {value}".rstrip() if flag in same else flag
                raise LaunchError(f"{name} is planned at {host}:{port}, and its flags have {said}: {remedy}")
        if moving is _ENGINE and _without_api(args):
            raise LaunchError(f"{name}'s flags have --api-server-count 0, which is headless: {_ENGINE['--headless']}")


def _found(args: Sequence[str], moving: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Each of the *moving* flags in *args*: its name, the value after it, and the remedy."""
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        flag = _whole_name(name, moving)
        if flag is not None:
            following = args[index + 1] if index + 1 < len(args) else ""
            yield (name if flag == "--ssl" else flag), (value if equals else following), moving[flag]


def _whole_name(name: str, moving: Mapping[str, str]) -> str | None:
    if name.startswith("--ssl"):
        return "--ssl"
    if name in moving:
        return name
    if moving is _ENGINE and len(name) >= _SHORTEST:
        return next((flag for flag in moving if flag.startswith(name)), None)
    return None


def _without_api(args: Sequence[str]) -> bool:
    words = [*args, ""]
    return any(
        (word in ("--api-server-count", "-asc") and words[index + 1] == "0") or word == "--api-server-count=0"
        for index, word in enumerate(args)
    )
