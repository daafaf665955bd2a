"""What a cluster is made of: roles, instances, the proxy. Values only, checked when they are made.

Both rooms that need them read these: the launcher plans and starts instances, the proxy
routes to them. No I/O here.
"""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


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


Port = Annotated[int, Field(ge=1, le=65535)]


class Value(BaseModel):
    """A frozen value; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
        cpus: core numbers it may use; empty means all.
        engine_args: `vllm serve` flags beyond Baton's own, as typed.
    """

    id: str
    side_channel_host: str = "127.0.0.1"
    side_channel_port: Port
    cpus: tuple[int, ...] = ()
    engine_args: tuple[str, ...] = ()


class Cluster(Value):
    """A planned cluster on one host.

    Attributes:
        model: what the user called it.
        transfer_mode: how the KV cache travels.
        proxy_host: where the proxy listens, with *proxy_port*.
        instances: prefill instances first.
    """

    model: str
    transfer_mode: TransferMode = TransferMode.READ
    proxy_host: str = "127.0.0.1"
    proxy_port: Port = 8000
    instances: tuple[Instance, ...]

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        return tuple(instance for instance in self.instances if instance.role is role)
