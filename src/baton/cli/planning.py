"""What `baton up`, `baton plan` and their like begin with: a planned cluster, the host that is meant, and its model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from baton.cli.cluster_flags import planned_cluster
from baton.cli.parser import Failure
from baton.cluster import THIS_HOST, Cluster
from baton.launch import ClusterFileError, LaunchError, Problem
from baton.models import ModelError, ResolvedModel, resolve


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What keeps a cluster from being planned ends the command with its line."""
    try:
        yield
    except ClusterFileError as error:
        raise Failure(str(error), 2, error.others) from error
    except LaunchError as error:
        raise Failure(str(error), 2) from error
    except ModelError as error:
        raise Failure(str(error)) from error


def refuse(problems: Sequence[Problem]) -> None:
    """End the command when there are *problems*: all of them, a line each."""
    if problems:
        code = 2 if all(problem.words for problem in problems) else 1
        raise Failure(problems[0].what, code, [problem.what for problem in problems[1:]])


def shared(args: argparse.Namespace, words_after: Sequence[str]) -> tuple[Cluster, str | None]:
    """The whole plan, and the host whose share of it is meant: of several the one that --host names, None for all.

    Without a file of several hosts --host is an address: where everything listens.

    Raises:
        LaunchError: --host names none of them.
    """
    host, args.host = args.host, None if args.cluster else args.host
    cluster = planned_cluster(args, words_after)
    hosts = hosts_of(cluster)
    if args.cluster is not None and host is not None and host not in hosts:
        if len(hosts) > 1:
            raise LaunchError(f"{_planned(args, hosts)}: --host {host} is none of them")
        args.host = host
        cluster = planned_cluster(args, words_after)
        return cluster, cluster.proxy_node
    if len(hosts) == 1:
        return cluster, hosts[0]
    return cluster, host


def one_share(args: argparse.Namespace, words_after: Sequence[str]) -> tuple[Cluster, str]:
    """The same where one host must be meant.

    Raises:
        LaunchError: the plan has several, and none of them was named.
    """
    cluster, node = shared(args, words_after)
    if node is None:
        raise LaunchError(f"{_planned(args, hosts_of(cluster))}: name the one that this is with --host")
    return cluster, node


def hosts_of(cluster: Cluster) -> tuple[str, ...]:
    """The hosts that anything of it runs on."""
    return tuple(dict.fromkeys((*cluster.nodes, cluster.proxy_node)))


def _planned(args: argparse.Namespace, hosts: Sequence[str]) -> str:
    return f"{args.cluster} plans {len(hosts)} hosts ({', '.join(hosts[:4])})"


def the_model(name: str) -> ResolvedModel:
    """The model, on this disk or by its id at the hub; unpacking one is said on stderr.

    Raises:
        ModelError: there is none.
    """
    return resolve(name, report=lambda line: print(f"{line} ...", file=sys.stderr, flush=True))


def find_model(cluster: Cluster) -> ResolvedModel:
    """The model, as this host has it; a folder that only other hosts have is taken as it is named.

    Raises:
        ModelError: there is no such model.
    """
    try:
        return the_model(cluster.model)
    except ModelError:
        if cluster.model.startswith("/") and THIS_HOST not in cluster.nodes:
            return ResolvedModel(cluster.model, cluster.model, local=False)
        raise
