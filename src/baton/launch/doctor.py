"""The doctor: looks at a planned cluster and this host, whatever is running, and says what is wrong in words.

It starts nothing and stops nothing. machine.py looks at the host; here the engines and the proxy are asked, over their
own HTTP, and every pair hands over once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from baton.cluster import Cluster, Instance, Role, TransferMode
from baton.counters import total
from baton.launch.findings import Finding, bad, note, ok, skipped
from baton.launch.hand_off import COUNT_SECONDS, HandOffFailed, Peer, hand_over
from baton.launch.lazy import lazily
from baton.launch.ports import means_here, peer_nodes
from baton.launch.probe import url_of

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 3.0
_WORD = {TransferMode.READ: "pull", TransferMode.WRITE: "push"}


@dataclass(frozen=True)
class Settings:
    """How the doctor looks.

    Attributes:
        hand_off_seconds: limit for one pair; the first one takes a handshake.
        count_seconds: how long to wait for the engines' counters after it.
        hand_offs: whether to try pairs at all.
        key: for engines that ask for one.
        node: which of the cluster's hosts this is; None for none of them.
    """

    hand_off_seconds: float = 60.0
    count_seconds: float = COUNT_SECONDS
    hand_offs: bool = True
    key: str | None = None
    node: str | None = None


@dataclass
class Seen:
    """What one engine said.

    Attributes:
        up: whether its health is good.
        trouble: why it is not.
        about: of /baton/engine; None when it has no such answer.
        version: of vLLM.
        models: the names that it serves.
        counted: what went wrong with hand-offs since its start, by the sample's name.
    """

    instance: Instance
    up: bool = False
    trouble: str = ""
    about: dict[str, Any] | None = None
    version: str | None = None
    models: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def peer(self) -> Peer:
        return Peer(self.instance.id, self.instance.host, self.instance.port, self.about)


async def look(cluster: Cluster, settings: Settings) -> tuple[list[Seen], str | None]:
    """Ask every engine what it is, and the proxy what is wrong with it: an empty text when nothing, None when down."""
    async with _session(settings, ANSWER_SECONDS) as session:
        seen = await asyncio.gather(*(_ask(session, instance) for instance in cluster.instances))
        proxy = await _get(session, url_of(cluster.proxy_host, cluster.proxy_port, "/health"))
    if proxy.status == 200:
        return list(seen), ""
    if proxy.status is None:
        return list(seen), None
    return list(seen), f"its health is {proxy.status}: {proxy.text[:300]}"


async def check_cluster_running(cluster: Cluster, settings: Settings) -> tuple[list[Finding], set[str]]:
    """Every finding about what runs, and the names of the processes that are up."""
    seen, proxy = await look(cluster, settings)
    up = {each.instance.id for each in seen if each.up} | ({"proxy"} if proxy is not None else set())
    findings = list(check_up(seen, proxy))
    good = [each for each in seen if each.up]
    findings += check_roles(cluster, good)
    findings += check_alike(good)
    findings += check_advertised(cluster, good)
    findings += await check_side_channels(cluster, good, settings.node)
    findings += check_counters(good)
    findings += [each async for each in check_hand_offs(good, settings)]
    return findings, up


def check_up(seen: Sequence[Seen], proxy: str | None) -> Iterator[Finding]:
    """Every engine and the proxy answer; with nothing running at all that is no fault."""
    if proxy is None and not any(each.up or each.about for each in seen) and _all_refused(seen):
        yield skipped("engines", "the cluster", "nothing is running: only this host was looked at")
        return
    for each in seen:
        url = url_of(each.instance.host, each.instance.port, "")
        if each.up:
            yield ok("engines", each.instance.id, f"answers at {url}")
        else:
            yield bad(
                "engines",
                each.instance.id,
                f"does not answer at {url}: {each.trouble}",
                "see its log; an engine that compiles may take minutes. If it runs elsewhere, mend host or port, or "
                "open the port in the security group",
            )
    if proxy is None:
        yield bad("proxy", "proxy", "does not answer, though engines are up", "start it: baton proxy -f FILE")
    elif proxy:
        yield bad("proxy", "proxy", proxy, "see what is said of the engines, then its log")
    else:
        yield ok("proxy", "proxy", "its health is good")


def _all_refused(seen: Sequence[Seen]) -> bool:
    return all(each.trouble.startswith("nobody listens") for each in seen)


def check_roles(cluster: Cluster, seen: Sequence[Seen]) -> Iterator[Finding]:
    """Each runs the phase that it is used for, in the cluster's transfer mode, with a connector."""
    for each in seen:
        name, about = each.instance.id, each.about
        if about is None:
            yield note(
                "role",
                name,
                "does not say what it is (no /baton/engine): it was not started by `baton engine`",
                "a hand-off shows whether it fits; write mode and bidirectional KV want Baton's engine",
            )
            continue
        if about.get("transfer_mode") is None:
            yield bad(
                "role",
                name,
                "has no KV connector: it would compute every prompt itself",
                f"start it with `baton engine --role {each.instance.role}`",
            )
            continue
        role, wanted = about.get("role"), each.instance.role.kv_role
        if role not in (wanted, "kv_both"):
            yield bad(
                "role",
                name,
                f"is used as a {each.instance.role} server and was started as {role}",
                f"start it with --role {each.instance.role}, or swap the ports of the two roles",
            )
        elif about["transfer_mode"] != _WORD[cluster.transfer_mode]:
            yield bad(
                "role",
                name,
                f"moves the KV cache by {about['transfer_mode']}, and the cluster is in {cluster.transfer_mode} mode",
                f"start it with --transfer-mode {cluster.transfer_mode}, as all others",
            )
        else:
            yield ok("role", name, f"{each.instance.role}, {cluster.transfer_mode} mode")


def check_alike(seen: Sequence[Seen]) -> Iterator[Finding]:
    """All are one version of vLLM and serve one model: vLLM refuses a pair of two versions at its first hand-off."""
    versions = {each.instance.id: each.version for each in seen if each.version}
    if len(set(versions.values())) > 1:
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield bad("versions", "the cluster", f"engines differ in vLLM: {said}", "install one version on all hosts")
    prefills = [each for each in seen if each.instance.role is Role.PREFILL]
    for decode in seen:
        for prefill in prefills:
            if decode.instance.role is Role.DECODE and not set(decode.models) <= set(prefill.models):
                yield bad(
                    "model",
                    f"{prefill.instance.id} and {decode.instance.id}",
                    f"serve {', '.join(prefill.models) or 'nothing'} and {', '.join(decode.models) or 'nothing'}",
                    "serve one model under one --served-model-name",
                )
    ids = [str(each.about["engine_id"]) for each in seen if each.about and each.about.get("engine_id")]
    for twice in sorted({each for each in ids if ids.count(each) > 1}):
        owners = " and ".join(each.instance.id for each in seen if each.about and each.about.get("engine_id") == twice)
        yield bad(
            "model",
            owners,
            f"have one engine id ({twice}), or are one engine",
            "give each engine an address of its own",
        )


def check_advertised(cluster: Cluster, seen: Sequence[Seen]) -> Iterator[Finding]:
    """The address that peers are told is one that they can reach, and the one that was planned."""
    peers = peer_nodes(cluster)
    met: dict[tuple[str, Any], list[str]] = {}
    for each in seen:
        if each.about:
            place = str(each.about.get("side_channel_host")), each.about.get("side_channel_port")
            met.setdefault(place, []).append(each.instance.id)
    for each in seen:
        if not each.about or not each.about.get("side_channel_host"):
            continue
        instance, name = each.instance, each.instance.id
        host, port = str(each.about["side_channel_host"]), each.about.get("side_channel_port")
        others = [node for node in peers[instance.role] if node != instance.node]
        if others and means_here(host):
            yield bad(
                "advertised host",
                name,
                f"tells peers on {', '.join(others[:4])} to meet it at {host}, which is their own host",
                f"start it with --side-channel-host {instance.side_channel_host}"
                if not means_here(instance.side_channel_host)
                else "give it --side-channel-host with an address that they reach",
            )
        elif host in ("0.0.0.0", "::"):
            yield note(
                "advertised host",
                name,
                f"tells peers to meet it at {host}: that works on one host only",
                "start it with --side-channel-host and a real address before another host joins",
            )
        elif twins := [other for other in met[host, port] if other != name]:
            yield bad(
                "advertised host",
                name,
                f"is met at {host}:{port}, as {' and '.join(twins)} is",
                "start it with --side-channel-host and an address of its own host, or another --side-channel-port",
            )
        elif (host, port) != (instance.side_channel_host, instance.side_channel_port):
            yield note(
                "advertised host",
                name,
                f"is met at {host}:{port}, and the plan says {instance.side_channel_host}:{instance.side_channel_port}",
                "mend the plan, or start it anew as planned",
            )
        else:
            yield ok("advertised host", name, f"peers meet it at {host}:{port}")


_TROUBLES = {
    "vllm:nixl_num_kv_expired_reqs_total": (
        "{} requests' KV cache was freed unread when its lease was over",
        "decode servers come too late: more of them or a shorter queue, or a longer kv_lease_duration (30 s)",
    ),
    "vllm:nixl_num_failed_transfers_total": (
        "{} transfers of KV cache have failed",
        "see its log for NIXL's error; check backend, network and the other engines' restarts",
    ),
    "vllm:nixl_num_failed_notifications_total": (
        "{} notes to other engines that their blocks can go have failed",
        "those engines went away, or the network did: blocks there wait for their lease to end",
    ),
}
"""vLLM's counters of what went wrong (0.32, nixl/stats.py)."""


def check_counters(seen: Sequence[Seen]) -> Iterator[Finding]:
    """What went wrong with hand-offs since each engine started; leases that ran out show clients or queues too slow."""
    for each in seen:
        for name, count in each.counted.items():
            what, remedy = _TROUBLES[name]
            yield note("leases" if "expired" in name else "transfers", each.instance.id, what.format(count), remedy)


async def check_side_channels(cluster: Cluster, seen: Sequence[Seen], node: str | None) -> list[Finding]:
    """Each rank's side channel takes connections from here, when a peer that needs it runs here.

    Args:
        node: which of the cluster's hosts this is; None looks at all of them from wherever this is.
    """
    needed = [each for each in seen if node is None or node in met_from(cluster, each.instance)]
    findings = [finding for found in await asyncio.gather(*map(_side_channel, needed)) for finding in found]
    others = dict.fromkeys(each for one in seen for each in met_from(cluster, one.instance) if each != node)
    if node is not None and others:
        there = ", ".join(f"`baton doctor -f FILE --host {each}`" for each in list(others)[:4])
        findings.append(skipped("side channel", "from other hosts", f"that is seen there only: {there}"))
    return findings


def met_from(cluster: Cluster, instance: Instance) -> tuple[str, ...]:
    """The hosts from which an engine's side channel is met: those of the peers that begin a handshake with it.

    In read mode decode servers begin all, but for turns that a prefill server pulls back; in write mode both do.
    """
    both = cluster.bidirectional or cluster.transfer_mode is TransferMode.WRITE
    return peer_nodes(cluster)[instance.role] if both or instance.role is Role.PREFILL else ()


async def _side_channel(each: Seen) -> list[Finding]:
    if not each.about or not each.about.get("side_channel_host"):
        return []
    host, first = str(each.about["side_channel_host"]), int(each.about["side_channel_port"])
    count = int(each.about.get("dp_size") or 1)
    name, findings = each.instance.id, []
    for port in range(first, first + count):
        trouble = await connect(host, port)
        if trouble:
            findings.append(
                bad(
                    "side channel",
                    name,
                    f"{host}:{port} cannot be reached from here: {trouble}",
                    "open the port between the hosts (security group, firewall), and see that the host is right",
                )
            )
    return findings or [ok("side channel", name, f"{host}:{first} can be reached from here")]


async def connect(host: str, port: int) -> str:
    """Why a TCP connection cannot be made; empty when it can."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


async def check_hand_offs(seen: Sequence[Seen], settings: Settings) -> AsyncIterator[Finding]:
    """Every pair hands over once, one after the other; bytes and milliseconds are said."""
    prefills = [each for each in seen if each.instance.role is Role.PREFILL]
    decodes = [each for each in seen if each.instance.role is Role.DECODE]
    if not settings.hand_offs:
        yield skipped("hand-off", "all pairs", "you asked to leave it out")
        return
    if not prefills or not decodes:
        yield skipped("hand-off", "all pairs", "it takes an engine of each role that is up")
        return
    async with _session(settings, settings.hand_off_seconds) as session:
        for prefill in prefills:
            for decode in decodes:
                yield await _try(session, prefill, decode, settings)


async def _try(session: aiohttp.ClientSession, prefill: Seen, decode: Seen, settings: Settings) -> Finding:
    pair = f"{prefill.instance.id} to {decode.instance.id}"
    if not prefill.models:
        return bad("hand-off", pair, f"{prefill.instance.id} names no model at /v1/models", "see its log")
    try:
        done = await hand_over(session, prefill.peer, decode.peer, prefill.models[0], settings.count_seconds)
    except HandOffFailed as error:
        return bad("hand-off", pair, str(error), error.remedy + _way(prefill, decode))
    took = f"prefill {done.prefill_ms:.0f} ms, hand-off and first token {done.decode_ms:.0f} ms"
    if done.moved is None:
        return note(
            "hand-off", pair, f"{took}; the engines count no bytes", "leave --disable-log-stats out to see them"
        )
    if not done.moved:
        return bad(
            "hand-off",
            pair,
            f"{took}, and no byte was moved: the decode server computed the prompt itself",
            "start the decode server with `baton engine --role decode`; see its log for the connector",
        )
    return ok("hand-off", pair, f"{done.moved:,} bytes; {took}")


def _way(prefill: Seen, decode: Seen) -> str:
    """What must be open between two hosts, as a remedy goes on; nothing for a pair on one."""
    if prefill.instance.node == decode.instance.node or not prefill.about:
        return ""
    host, port = prefill.about.get("side_channel_host"), prefill.about.get("side_channel_port")
    return (
        f"; from {decode.instance.node} {host}:{port} must be open, and the ports that the transfer takes "
        "(docs/multi-node.md)"
    )


# asking


@dataclass(frozen=True)
class Reply:
    """What came of a GET; without a status *text* says why there is none."""

    status: int | None
    text: str

    def json(self) -> Any:
        """Its JSON, or None."""
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(self.text) if self.status == 200 else None
        return None


async def _ask(session: aiohttp.ClientSession, instance: Instance) -> Seen:
    """Everything that one engine says of itself."""
    health, about, version, models, metrics = await asyncio.gather(
        *(
            _get(session, url_of(instance.host, instance.port, path))
            for path in ("/health", "/baton/engine", "/version", "/v1/models", "/metrics")
        )
    )
    trouble = "" if health.status == 200 else health.text if health.status is None else f"its health is {health.status}"
    return Seen(
        instance,
        up=health.status == 200,
        trouble=trouble,
        about=_dict(about.json()),
        version=(_dict(version.json()) or {}).get("version"),
        models=_names(models.json()),
        counted=_counted(metrics),
    )


async def _get(session: aiohttp.ClientSession, url: str) -> Reply:
    try:
        async with session.get(url) as response:
            return Reply(response.status, await response.text())
    except TimeoutError:
        return Reply(None, f"no answer within {ANSWER_SECONDS:.0f} s")
    except aiohttp.ClientConnectorDNSError as error:
        return Reply(None, f"the host name does not resolve ({error.strerror})")
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return Reply(None, "nobody listens there" if refused else error.os_error.strerror or str(error))
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        return Reply(None, f"what answers is no engine ({type(error).__name__})")


def _session(settings: Settings, seconds: float) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), headers=headers)


def _dict(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _counted(metrics: Reply) -> dict[str, int]:
    if metrics.status != 200:
        return {}
    with contextlib.suppress(ValueError):
        return {name: int(count) for name in _TROUBLES if (count := total(metrics.text.encode(), name.encode()))}
    return {}


def _names(value: Any) -> list[str]:
    data: Mapping[str, Any] = _dict(value) or {}
    listed = data.get("data")
    return (
        [str(each["id"]) for each in listed if isinstance(each, dict) and "id" in each]
        if isinstance(listed, list)
        else []
    )
