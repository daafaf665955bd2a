"""Who listens where in a planned cluster, and that no port of a host has two owners. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.cluster import Cluster, Instance, Role
from baton.launch.commands import flag_value
from baton.launch.errors import LaunchError
from baton.launch.shapes import ranks_of, side_channels
from baton.numbers import decimal

DP_RPC_PORT = 29550
MASTER_PORT = 29501
"""vLLM's defaults (0.32, config/parallel.py)."""


def means_here(host: str) -> bool:
    """Whether *host* is each host's own: loopback, or all addresses. Peers elsewhere cannot reach it."""
    return host in ("localhost", "::1", "0.0.0.0", "::", "") or host.startswith("127.")


@dataclass(frozen=True)
class Claim:
    """A port that something will listen on.

    Attributes:
        node: the host, by its name in the plan.
        host: the address to bind.
        port: its number.
        owner: whose it is, for people: ``D0's side channel of rank 1``.
        process: ``D0`` or ``proxy``.
        what: ``API and metrics``, ``side channel``, ...
    """

    node: str
    host: str
    port: int
    owner: str
    process: str
    what: str


def claims_of(cluster: Cluster) -> list[Claim]:
    """Everything that will listen on a port that is known before it starts."""
    node, host = cluster.proxy_node, cluster.proxy_host
    claims = [Claim(node, host, cluster.proxy_port, "the proxy", "proxy", "API and metrics")]
    for instance in cluster.instances:
        claims += instance_claims(instance)
    return claims


def instance_claims(instance: Instance) -> list[Claim]:
    """What one engine will listen on: its metrics are on its API's port."""

    def claim(host: str, port: int, what: str, shown: str = "") -> Claim:
        return Claim(instance.node, host, port, f"{instance.id}'s {what}", instance.id, shown or what)

    ranks = ranks_of(instance.engine_args)
    sides = side_channels(instance.side_channel_port, ranks)
    claims = [claim(instance.host, instance.port, "API", "API and metrics")]
    claims += [claim(instance.side_channel_host, port, what) for port, what in sides.items()]
    if ranks.local < ranks.data and ranks.first == 0:
        # Ranks of one process meet over Unix sockets and on ports that vLLM finds free when it starts.
        host = _value(instance.engine_args, "--data-parallel-address", "-dpa") or instance.host
        port = _number(instance.engine_args, DP_RPC_PORT, "--data-parallel-rpc-port", "-dpp")
        claims.append(claim(host, port, "data parallel RPC"))
    nodes = _number(instance.engine_args, 1, "--nnodes", "-n")
    if nodes > 1 and _number(instance.engine_args, 0, "--node-rank", "-r") == 0:
        port = _number(instance.engine_args, MASTER_PORT, "--master-port")
        claims.append(claim(flag_value(instance.engine_args, "--master-addr") or instance.host, port, "master"))
    return claims


def peer_nodes(cluster: Cluster) -> dict[Role, tuple[str, ...]]:
    """For each role, the hosts that its peers of the other role run on."""
    nodes = {role: tuple(dict.fromkeys(each.node for each in cluster.of_role(role))) for role in Role}
    return {Role.PREFILL: nodes[Role.DECODE], Role.DECODE: nodes[Role.PREFILL]}


def node_at(cluster: Cluster, addresses: Collection[str]) -> str | None:
    """The one host of *cluster* whose processes listen on one of *addresses*; None when that is none or several."""
    homes = {(each.host, each.node) for each in cluster.instances} | {(cluster.proxy_host, cluster.proxy_node)}
    nodes = {node for host, node in homes if host in addresses and not means_here(host)}
    return nodes.pop() if len(nodes) == 1 else None


def port_owners(cluster: Cluster) -> dict[tuple[str, int], str]:
    """Every host's ports and whose they are.

    Raises:
        LaunchError: one has two owners; the message names both.
    """
    owners: dict[tuple[str, int], str] = {}
    for claim in claims_of(cluster):
        place = claim.node, claim.port
        if place in owners:
            where = f" on {claim.node}" if len(cluster.nodes) > 1 else ""
            raise LaunchError(
                f"port {claim.port} is planned for {owners[place]} and for {claim.owner}{where}: move one of them"
            )
        owners[place] = claim.owner
    return owners


def _value(args: Sequence[str], *names: str) -> str | None:
    return next((value for name in names if (value := flag_value(args, name)) is not None), None)


def _number(args: Sequence[str], default: int, *names: str) -> int:
    text = _value(args, *names)
    value = decimal(text)
    return default if value is None else value
