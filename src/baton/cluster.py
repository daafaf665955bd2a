"""What a cluster is made of: roles, instances, the proxy. Values only, checked when they are made.

Both rooms that need them read these: the launcher plans and starts instances, the proxy
routes to them. No I/O here.
"""

from __future__ import annotations

import enum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Role(enum.StrEnum):
    """The phase that an instance runs."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def kv_role(self) -> str:
        """vLLM's word for it in ``kv_transfer_config`` (producer and consumer of the KV cache)."""
        return "kv_producer" if self is Role.PREFILL else "kv_consumer"

    @property
    def letter(self) -> str:
        return "P" if self is Role.PREFILL else "D"


class TransferMode(enum.StrEnum):
    """Who moves the KV cache: in read mode the decode server pulls it, in write mode the prefill server pushes it."""

    READ = "read"
    WRITE = "write"


class TransferBackend(enum.StrEnum):
    """NIXL's backend that moves the KV cache; the names are NIXL's."""

    UCX = "UCX"
    LIBFABRIC = "LIBFABRIC"


class Device(enum.StrEnum):
    """What engines compute on."""

    CPU = "cpu"
    CUDA = "cuda"
    NEURON = "neuron"


Port = Annotated[int, Field(ge=1, le=65535)]

THIS_HOST = "localhost"
"""What a plan calls the host of whatever listens on loopback or on all addresses and says nothing more."""


class Value(BaseModel):
    """A frozen value; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Transport(Value):
    """What the KV cache travels over; None leaves a choice to Baton's defaults.

    Attributes:
        backend: of NIXL.
        ucx_tls: UCX's transports, as in its variable UCX_TLS.
        threads: of NIXL, that post reads and wait for them.
    """

    backend: TransferBackend | None = None
    ucx_tls: str | None = None
    threads: Annotated[int, Field(ge=0)] | None = None


class Endpoint(Value):
    """An engine as the proxy sees it.

    Attributes:
        role: the phase it runs.
        host: name or address, an IPv6 address without brackets.
        port: its HTTP port.
        tls: whether it speaks https.
    """

    role: Role
    host: str
    port: Port
    tls: bool = False

    @classmethod
    def from_url(cls, role: Role, url: str) -> Endpoint:
        """The engine at *url*.

        Raises:
            ValueError: that is no URL of a server.
        """
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError
            if parts.query or parts.fragment or parts.username is not None:
                raise ValueError
            tls = parts.scheme == "https"
            return cls(role=role, host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls)
        except (ValueError, ValidationError):
            raise ValueError(f"{url!r} is not a URL such as http://host:8100") from None

    @property
    def authority(self) -> str:
        """``host:port`` as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"


class Instance(Endpoint):
    """An engine as the launcher plans it.

    Attributes:
        id: ``P0``, ``P1``, ``D0``, ...
        side_channel_host: where NIXL's metadata exchange binds and what is advertised to peers.
        side_channel_port: its first port; one a data-parallel rank.
        node: the host it runs on, by the name in the plan.
        cpus: core numbers it may use; empty means all.
        devices: numbers of the accelerators that it may see; empty means all.
        engine_args: `vllm serve` flags beyond Baton's own, as typed.
        environ: variables for it; they win over the caller's environment.
    """

    id: str
    side_channel_host: str = "127.0.0.1"
    side_channel_port: Port
    node: str = THIS_HOST
    cpus: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    engine_args: tuple[str, ...] = ()
    environ: dict[str, str] = {}


class Cluster(Value):
    """A planned cluster, on one host or several.

    Attributes:
        model: what the user called it.
        device: what engines compute on; None is what the installed vLLM is for.
        transfer_mode: how the KV cache travels.
        bidirectional: whether decode servers keep a turn's KV cache for the next turn's prefill server.
        pull_threshold: tokens below which that computes them instead; None leaves vLLM's default.
        transport: what it travels over.
        proxy_host: where the proxy listens, with *proxy_port*.
        proxy_node: the host it runs on.
        proxy_flags: more flags of the proxy.
        devices, cpus: of each host, by name: its accelerators, and cores that engines may use, where known.
        instances: prefill instances first.
    """

    model: str
    device: Device | None = None
    transfer_mode: TransferMode = TransferMode.READ
    bidirectional: bool = False
    pull_threshold: int | None = None
    transport: Transport = Transport()
    proxy_host: str = "127.0.0.1"
    proxy_port: Port = 8000
    proxy_node: str = THIS_HOST
    proxy_flags: tuple[str, ...] = ()
    devices: dict[str, tuple[int, ...]] = {}
    cpus: dict[str, tuple[int, ...]] = {}
    instances: tuple[Instance, ...]

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        return tuple(instance for instance in self.instances if instance.role is role)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The hosts that engines run on, in the order of the instances."""
        return tuple(dict.fromkeys(instance.node for instance in self.instances))

    def on(self, node: str) -> tuple[Instance, ...]:
        """The instances of one host."""
        return tuple(instance for instance in self.instances if instance.node == node)
