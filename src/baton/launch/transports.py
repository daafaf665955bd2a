"""How NIXL moves the KV cache: which backend, which of UCX's transports, how many threads.

Pure functions: from what was asked for to keys of vLLM's kv_connector_extra_config and variables for UCX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.cluster import TransferBackend, Transport
from baton.launch.errors import LaunchError

UCX_TLS = "UCX_TLS"
CPU_TLS = "^posix,sysv"
"""On CPU: all but shared memory, in pieces of which UCX would move a part of what cross-memory attach moves faster."""
CPU_THREADS = 1
"""Of NIXL, on CPU: vLLM's 4 poll on cores that compute, and move nothing faster (docs/performance.md)."""
UCX_TCP_USER_TIMEOUT = "UCX_TCP_USER_TIMEOUT"
TCP_SECONDS = 20
"""How long what was sent over TCP may stay unacknowledged before the connection is given up; less than a lease (30 s).
UCX leaves it to the kernel, which tries for a quarter of an hour (Linux, tcp_retries2). With nixl 1.5.1 a read was
given up 37 s after its peer was cut off, a write after 19 s; without it a read hung for as long as was tried, 150 s."""


def extra_config(asked: Transport, given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """kv_connector_extra_config: the user's own keys, and ours.

    Args:
        asked: our flags.
        given: what stands in --kv-transfer-config.
        device: ``cpu`` or ``accelerator``.

    Raises:
        LaunchError: a flag and a key of --kv-transfer-config say different things, or there is no such backend.
    """
    ours: dict[str, Any] = {}
    if asked.backend is not None:
        ours["backends"] = [str(asked.backend)]
    if asked.threads is not None:
        ours["num_threads"] = asked.threads
    for flag, key in (("--transfer-backend", "backends"), ("--nixl-threads", "num_threads")):
        if key in ours and given.get(key, ours[key]) != ours[key]:
            said = ours[key][0] if key == "backends" else ours[key]
            raise LaunchError(
                f"{flag} {said} and {key} {given[key]!r} in --kv-transfer-config's kv_connector_extra_config differ: "
                "give one of them"
            )
    _check_backends(given.get("backends", []))
    if device == "cpu":
        ours.setdefault("num_threads", CPU_THREADS)
    return {**ours, **given}


def environ(asked: Transport, config: Mapping[str, Any], device: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that the backends read.

    Args:
        asked: our flags.
        config: kv_connector_extra_config as it will be.
        device: ``cpu`` or ``accelerator``.
        given: the caller's environment; what stands there wins over our default.

    Raises:
        LaunchError: transports of UCX for an engine that doesn't use it.
    """
    backends = config.get("backends", [str(TransferBackend.UCX)])
    if str(TransferBackend.UCX) not in backends:
        if asked.ucx_tls is not None:
            raise LaunchError(
                f"--ucx-tls {asked.ucx_tls} is for backend UCX, and this engine uses {', '.join(backends)}"
            )
        return {}
    defaults = {UCX_TCP_USER_TIMEOUT: f"{TCP_SECONDS}s", **({UCX_TLS: CPU_TLS} if device == "cpu" else {})}
    ours = {name: value for name, value in defaults.items() if name not in given}
    return ours if asked.ucx_tls is None else {**ours, UCX_TLS: asked.ucx_tls}


def _check_backends(given: Any) -> None:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise LaunchError(f"backends {given!r} in --kv-transfer-config is not a list of names such as ['UCX']")
