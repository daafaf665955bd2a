"""The cluster file: what `baton up`, `baton plan` and `baton proxy` are asked for. Values only.

file_reader.py reads one, file_plan.py makes a cluster of it, file_template.py writes one.
"""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from baton.cluster import Device, Port, Role, TransferBackend, TransferMode, Value
from baton.engine import CPUS, ENGINE_SWITCH, parse_cpus
from baton.launch.commands import SIDE_CHANNEL_HOST, SIDE_CHANNEL_PORT, dashed
from baton.numbers import MOST_SERVERS


def _words(value: Any) -> Any:
    """Flags as one text or as a list of words."""
    if isinstance(value, str):
        return dashed(shlex.split(value))
    if not isinstance(value, list | tuple):
        return value
    for word in value:
        flag = str(word).partition("=")[0]
        if flag.startswith("--") and " " in flag:
            raise ValueError(f"{word!r} is a flag and its value in one: make them two items, or give all as one text")
    return dashed([word if isinstance(word, str) else json.dumps(word) for word in value])


def _numbers(value: Any) -> Any:
    """Numbers of cores or devices as a list, as one number, or as text such as 0-3,8."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return parse_cpus(str(value))


def _texts(value: Any) -> Any:
    """Values of the environment are text, also where YAML reads a number."""
    if not isinstance(value, dict):
        return value
    texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in value.items()}
    for name, text in texts.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a variable: it may be no number, be empty, or hold = or NUL")
        if "\0" in text:
            raise ValueError(f"{name} is {text!r}, and no variable can hold NUL: leave that out")
    ours = {SIDE_CHANNEL_HOST: "side_channel_host", SIDE_CHANNEL_PORT: "side_channel_port", CPUS: "cpus"}
    for name, key in ours.items():
        if name in texts:
            raise ValueError(f"{name} is set by Baton: use the key {key}")
    if ENGINE_SWITCH in texts:
        raise ValueError(f"{ENGINE_SWITCH} is set by Baton: leave it out")
    return texts


def _address(value: Any) -> Any:
    """A host given by its address alone."""
    return {"address": value} if isinstance(value, str) else value


def _entries(value: Any) -> Any:
    """A role with one kind of server need not be a list; a number is that many of Baton's defaults."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return [{"replicas": value}]
    return value


Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_words, json_schema_input_type=str | list[str | int | float | bool | dict[str, Any]]),
]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers, json_schema_input_type=int | str | list[int])]
Texts = Annotated[dict[str, str], BeforeValidator(_texts, json_schema_input_type=dict[str, str | int | float | bool])]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class EngineLimits(Value):
    """What an engine may hold; each is the flag of `vllm serve` of that name."""

    max_model_len: Annotated[Count | None, Field(description="tokens of prompt and answer together")] = None
    max_num_seqs: Annotated[Count | None, Field(description="requests in one step")] = None
    max_num_batched_tokens: Annotated[Count | None, Field(description="tokens in one step")] = None
    kv_cache_memory_bytes: Annotated[Count | None, Field(description="bytes of KV cache, a worker")] = None

    def words(self) -> tuple[str, ...]:
        given = self.model_dump(exclude_none=True)
        return tuple(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value)))


class EngineDefaults(Value):
    """What holds for several engines, unless one says otherwise."""

    host: Annotated[str | None, Field(description="a name from hosts, or an address; it listens there")] = None
    side_channel_host: Annotated[
        str | None, Field(description="where NIXL's metadata exchange binds and what peers are told; default: the host")
    ] = None
    tensor_parallel_size: Annotated[Count | None, Field(description="ranks that share each layer")] = None
    pipeline_parallel_size: Annotated[Count | None, Field(description="stages that share the layers")] = None
    data_parallel_size: Annotated[Count | None, Field(description="copies that share the requests")] = None
    enable_expert_parallel: Annotated[bool | None, Field(description="spread experts over all ranks")] = None
    limits: Annotated[EngineLimits, Field(description="what an engine may hold")] = EngineLimits()
    engine_args: Annotated[Words, Field(description="vllm serve's flags; those of an entry come later and win")] = ()
    environ: Annotated[Texts, Field(description="variables; those of an entry win")] = Field(default_factory=dict)

    def words(self) -> tuple[str, ...]:
        """The flags of `vllm serve` that all of it comes to."""
        sizes = [
            word
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
            if (value := getattr(self, name)) is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        spread = {True: ("--enable-expert-parallel",), False: ("--no-enable-expert-parallel",), None: ()}
        return (*sizes, *spread[self.enable_expert_parallel], *self.limits.words(), *self.engine_args)

    def over(self, below: EngineDefaults) -> EngineDefaults:
        """These, where they say something, else those *below*; flags after theirs, variables over theirs."""
        return EngineDefaults(
            host=self.host or below.host,
            side_channel_host=self.side_channel_host or below.side_channel_host,
            tensor_parallel_size=self.tensor_parallel_size or below.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size or below.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size or below.data_parallel_size,
            enable_expert_parallel=below.enable_expert_parallel
            if self.enable_expert_parallel is None
            else self.enable_expert_parallel,
            limits=below.limits.model_copy(update=self.limits.model_dump(exclude_none=True)),
            engine_args=(*below.engine_args, *self.engine_args),
            environ={**below.environ, **self.environ},
        )


class Defaults(EngineDefaults):
    """What holds for all engines, and for those of a role."""

    prefill: Annotated[EngineDefaults, Field(description="for prefill servers, over those for all")] = EngineDefaults()
    decode: Annotated[EngineDefaults, Field(description="for decode servers, over those for all")] = EngineDefaults()

    def of_role(self, role: Role) -> EngineDefaults:
        return (self.prefill if role is Role.PREFILL else self.decode).over(self)


class EngineEntry(EngineDefaults):
    """One engine, or several alike."""

    hosts: Annotated[tuple[str, ...], Field(description="several hosts; replicas are on each")] = ()
    port: Annotated[Port | None, Field(description="of its API; the next replica takes the next")] = None
    side_channel_port: Annotated[
        Port | None, Field(description="its first, one a data-parallel rank; the next replica takes the next")
    ] = None
    cpus: Annotated[Numbers | None, Field(description="its cores, such as 0-3,8; default: a share of all")] = None
    devices: Annotated[
        Numbers | None, Field(description="its accelerators, such as 0-7; default: the next free ones of its host")
    ] = None
    replicas: Annotated[Count, Field(le=MOST_SERVERS, description="how many alike")] = 1

    @model_validator(mode="after")
    def _one_way_to_name_hosts(self) -> EngineEntry:
        if self.host is not None and self.hosts:
            raise ValueError("it has both host and hosts: keep one of them")
        return self


class HostPart(Value):
    """A host that engines run on."""

    address: Annotated[str | None, Field(description="where others reach it; default: its name")] = None
    devices: Annotated[Numbers | None, Field(description="accelerators that it has, such as 0-63")] = None
    cpus: Annotated[Numbers | None, Field(description="cores that engines may use, such as 0-31")] = None
    numa: Annotated[
        tuple[Numbers, ...], Field(description="cores of each NUMA node; engines are kept within one where that can be")
    ] = ()


class ProxyPart(Value):
    """The proxy."""

    host: Annotated[str | None, Field(description="a name from hosts, or an address; it listens there")] = None
    port: Annotated[Port | None, Field(description="default: 8000")] = None
    policy: Annotated[str | None, Field(description="how an instance is chosen, as baton proxy's --policy")] = None
    max_concurrent_requests: Annotated[int | None, Field(ge=0, description="more wait in line; 0: no limit")] = None
    queue_size: Annotated[int | None, Field(ge=0, description="how many may wait; more are 429")] = None
    queue_timeout_secs: Annotated[Seconds | None, Field(description="how long one may wait")] = None
    request_timeout_secs: Annotated[Seconds | None, Field(description="limit for one leg")] = None
    flags: Annotated[Words, Field(description="more of baton proxy's flags")] = ()

    def words(self) -> tuple[str, ...]:
        """The flags of `baton proxy`, but for where it listens."""
        given = self.model_dump(exclude_none=True, exclude={"host", "port", "flags"})
        typed = (
            (f"--{name.replace('_', '-')}", format(value, "g") if isinstance(value, float) else str(value))
            for name, value in given.items()
        )
        return (*(word for pair in typed for word in pair), *self.flags)


Entries = Annotated[
    tuple[EngineEntry, ...],
    Field(min_length=1),
    BeforeValidator(_entries, json_schema_input_type=list[EngineEntry] | EngineEntry | Count),
]
Hosts = dict[str, Annotated[HostPart, BeforeValidator(_address, json_schema_input_type=HostPart | str)]]


class ClusterFile(Value):
    """A cluster of prefill and decode servers and the proxy before them."""

    model: Annotated[str, Field(description="an embedded model's name, a folder, or a hub id")]
    device: Annotated[
        Device | None, Field(description="what engines compute on; default: what the installed vLLM is for")
    ] = None
    transfer_mode: Annotated[
        TransferMode, Field(description="read: the decode server pulls the KV cache; write: the prefill server pushes")
    ] = TransferMode.READ
    transfer_backend: Annotated[TransferBackend | None, Field(description="NIXL's; default: UCX")] = None
    ucx_tls: Annotated[str | None, Field(description="UCX's transports, such as cma,tcp,self")] = None
    nixl_threads: Annotated[int | None, Field(ge=0, description="threads of NIXL beside its progress thread")] = None
    bidirectional_kv: Annotated[
        bool, Field(description="decode servers keep a turn's KV cache for the next prefill")
    ] = False
    remote_pull_threshold: Annotated[
        int | None, Field(ge=0, description="fewer tokens of a kept turn are computed instead of pulled")
    ] = None
    hosts: Annotated[Hosts, Field(description="hosts by name: an address, or more about each")] = Field(
        default_factory=dict
    )
    proxy: Annotated[ProxyPart, Field(description="the proxy")] = ProxyPart()
    defaults: Annotated[Defaults, Field(description="for all engines")] = Defaults()
    prefill: Annotated[Entries, Field(description="prefill servers: a list, one kind, or how many")]
    decode: Annotated[Entries, Field(description="decode servers: a list, one kind, or how many")]

    def of_role(self, role: Role) -> tuple[EngineEntry, ...]:
        return self.prefill if role is Role.PREFILL else self.decode


def schema() -> dict[str, Any]:
    """The JSON schema of a cluster file, for editors; ``cluster.schema.json`` beside this file holds it."""
    made = ClusterFile.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "Baton cluster file"}
