"""Writing a new cluster file, with comments, from what somebody wants. Pure: text is all that it makes.

Baton never rewrites a file that exists, so that its comments stay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster import Device, Role, TransferMode


@dataclass(frozen=True)
class Wish:
    """What `baton init` was asked for.

    Attributes:
        model: an embedded model's name, a folder, or a hub id.
        prefill, decode: how many servers of each role.
        hosts: addresses that they are spread over, one after the other; empty for this host alone.
        device: what engines compute on; None leaves it to the installed vLLM.
        transfer_mode: who moves the KV cache.
        prefill_tensor, decode_tensor: tensor parallel sizes.
        port: the proxy's.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    hosts: tuple[str, ...] = ()
    device: Device | None = None
    transfer_mode: TransferMode = TransferMode.READ
    prefill_tensor: int = 1
    decode_tensor: int = 1
    port: int = 8000


def written(wish: Wish, name: str) -> str:
    """The text of a cluster file called *name*."""
    lines = [
        f"# {wish.prefill} prefill and {wish.decode} decode servers. See what it comes to: baton plan -f {name}",
        f"# Start it: baton up -f {name}"
        if len(wish.hosts) < 2
        else f"# Start it, on each host: baton up -f {name} --host NAME",
        "# All keys: docs/reference.md; for editors: baton plan --schema > baton.schema.json",
        "",
        "# An embedded model's name, a folder, or a hub id.",
        f"model: {_scalar(wish.model)}",
        "",
        "# Who moves the KV cache: read (decode servers pull) or write (prefill servers push).",
        f"transfer_mode: {wish.transfer_mode}",
        "",
        "# What engines compute on: cpu, cuda or neuron. Left out, it is what the installed vLLM is for.",
        "# device: cuda" if wish.device is None else f"device: {wish.device}",
        "",
    ]
    if wish.hosts:
        lines += ["# Hosts by name, each with the address that the others reach it at. Engines take them in turn,"]
        lines += ["# prefill servers first; the proxy is on the first one. A host may say what it has:"]
        lines += ["#   big: {address: 10.0.1.10, devices: 0-63, cpus: 0-95}", "hosts:"]
        lines += [f"  host{index}: {_scalar(address)}" for index, address in enumerate(wish.hosts)]
        lines += [""]
    lines += [
        "proxy:",
        f"  port: {wish.port}",
        "  # How an instance is chosen, and how many requests may be under way and wait in line.",
        "  # policy: round_robin",
        "  # max_concurrent_requests: 64",
        "  # queue_size: 100",
        "",
        "# For every engine. Flags of `vllm serve` go to engine_args, variables to environ.",
        "defaults:",
        "  # limits:",
        "  #   max_model_len: 4096",
        "  #   max_num_seqs: 16",
        "  engine_args: []",
        "  environ: {}",
        "",
    ]
    for role, count, tensor in (
        (Role.PREFILL, wish.prefill, wish.prefill_tensor),
        (Role.DECODE, wish.decode, wish.decode_tensor),
    ):
        api, side = (8100, 5559) if role is Role.PREFILL else (8200, 5659)
        lines += [
            f"# {role.capitalize()} servers. APIs count up from port {api} and side channels from {side} on each host.",
            f"{role}:",
            f"  - replicas: {count}",
            f"    tensor_parallel_size: {tensor}" if tensor > 1 else "    # tensor_parallel_size: 2",
            "    # engine_args: --max-num-batched-tokens 8192",
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _scalar(text: str) -> str:
    """*text* as YAML reads it back."""
    plain = text.replace("/", "").replace(".", "").replace("-", "").replace("_", "").replace("~", "")
    return text if plain.isalnum() and not plain[0].isdigit() and plain.lower() not in _TAKEN else json.dumps(text)


_TAKEN = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))


def addresses(words: Sequence[str]) -> tuple[str, ...]:
    """Hosts given as words, or as one text with commas."""
    return tuple(part for word in words for part in word.replace(",", " ").split())
