"""What each engine of a planned cluster will run with, read off its flags and the model's config.

Values that only vLLM can tell (an ``auto`` that hangs on the device) are None.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from baton.cluster import Cluster, Instance, Role
from baton.launch.commands import Command, flag_value
from baton.launch.model_config import has_state
from baton.launch.shapes import ranks_of
from baton.numbers import decimal, human_size

CPU_BLOCK = 128
"""Tokens a block on CPU unless something else is asked for (vllm 0.32, platforms/cpu.py)."""

HYBRID_OFF = "--disable-hybrid-kv-cache-manager"

_MODES = {"NixlConnector": "read", "NixlPullConnector": "read", "NixlPushConnector": "write"}
_DTYPES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class Planned:
    """What one engine will run with.

    Attributes:
        id: ``P0``, ``D1``.
        role: its phase.
        model: folder or hub id.
        args: every flag of `vllm serve`.
        transfer: its ``kv_transfer_config``.
    """

    id: str
    role: Role
    model: str
    args: tuple[str, ...]
    transfer: Mapping[str, Any]

    @classmethod
    def of(cls, instance: Instance, command: Command) -> Planned:
        transfer = json.loads(flag_value(command.argv, "--kv-transfer-config") or "{}")
        return cls(instance.id, instance.role, command.argv[3], tuple(command.argv[4:]), transfer)

    def flag(self, *names: str) -> str | None:
        """The value of a flag by any of its names, or None."""
        return next((value for name in names if (value := flag_value(self.args, name)) is not None), None)

    def has(self, name: str) -> bool | None:
        """Whether a flag without value is on; of it and its ``--no-`` the last wins. None when neither was given."""
        negated = f"--no-{name.removeprefix('--')}"
        return next((word == name for word in reversed(self.args) if word in (name, negated)), None)

    @property
    def mode(self) -> str:
        return _MODES.get(str(self.transfer.get("kv_connector")), "read")

    @property
    def extra(self) -> Mapping[str, Any]:
        extra = self.transfer.get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}


@dataclass(frozen=True)
class Plan:
    """What the checks look at.

    Attributes:
        engines: all of them.
        config: the model's config.json; empty when it is not on this disk.
        device: ``cpu`` or ``accelerator``.
    """

    engines: tuple[Planned, ...]
    config: Mapping[str, Any]
    device: str

    def of_role(self, role: Role) -> Sequence[Planned]:
        return [engine for engine in self.engines if engine.role is role]

    def pairs(self) -> Iterable[tuple[Planned, Planned]]:
        return product(self.of_role(Role.PREFILL), self.of_role(Role.DECODE))


def kinds_of(cluster: Cluster, commands: Sequence[Command]) -> list[tuple[Instance, Command]]:
    """One engine of each kind, in their order: those that differ in nothing but where they are, are looked at once.

    Engines that are given a name of their own are told apart: it may be the same one.

    Args:
        commands: of *cluster*'s instances, in their order.
    """
    found: dict[tuple[object, ...], tuple[Instance, Command]] = {}
    for each in zip(cluster.instances, commands, strict=True):
        instance, _ = each
        named = instance.id if any("engine_id" in word for word in instance.engine_args) else None
        key = (named, instance.role, instance.engine_args, *sorted(instance.environ.items()))
        found.setdefault(key, each)
    return list(found.values())


def names(engine: Planned) -> list[str]:
    """What an engine calls its model; the last --served-model-name wins, and it takes several."""
    found = [engine.model]
    for index, word in enumerate(engine.args):
        if word == "--served-model-name":
            following = engine.args[index + 1 :]
            end = next((at for at, each in enumerate(following) if each.startswith("-")), len(following))
            found = list(following[:end])
        elif word.startswith("--served-model-name="):
            found = [word.partition("=")[2]]
    return found


def hybrid_off(engine: Planned, plan: Plan) -> str | None:
    """Unasked it is off on CPU; on other devices vLLM looks at the platform."""
    given = engine.has(HYBRID_OFF)
    if given is None:
        return "off" if plan.device == "cpu" else None
    return "on" if given else "off"


def dtype(engine: Planned, plan: Plan) -> str | None:
    """The type that an engine computes in, or None when only vLLM can tell."""
    given = (engine.flag("--dtype") or "auto").lower()
    if given != "auto":
        return _DTYPES.get(given, given)
    stored = str(plan.config.get("dtype") or plan.config.get("torch_dtype") or "").removeprefix("torch.")
    # A model in float32 is served in what the device prefers: bfloat16 on CPU, but for Macs (platforms/cpu.py).
    if stored == "float32" and plan.device == "cpu" and sys.platform == "linux":
        return "bfloat16"
    return stored if stored in ("bfloat16", "float16") else None


def cache_dtype(engine: Planned, plan: Plan) -> str | None:
    """As the hash has it: ``auto`` and the type that it comes to are not the same to vLLM."""
    given = engine.flag("--kv-cache-dtype") or "auto"
    return None if given == "auto" and plan.config.get("quantization_config") else given


def block_size(engine: Planned, plan: Plan) -> int | None:
    """Tokens a block, or None when only vLLM can tell."""
    if is_mla(plan.config) or has_state(_text_config(plan.config)):
        return None
    given = engine.flag("--block-size")
    if given is None:
        return CPU_BLOCK if plan.device == "cpu" else None
    return whole(given)


def length(engine: Planned, plan: Plan) -> int | None:
    """Tokens of prompt and answer together, or None when only vLLM can tell."""
    given = engine.flag("--max-model-len")
    if given is None:
        own = plan.config.get("max_position_embeddings")
        rope = plan.config.get("rope_scaling") or plan.config.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "?"
        plain = kind == "default" and engine.flag("--hf-overrides") is None
        return own if isinstance(own, int) and plain else None
    return human_size(given)


def tensor_parallel(engine: Planned) -> int:
    return ranks_of(engine.args).tensor


def whole(text: str | None) -> int | None:
    """A number of 1 or more that a flag holds; None for anything else."""
    return decimal(text) or None


def size(text: str | None) -> int | None:
    """The same where vLLM takes ``2k`` as well."""
    return human_size(text or "") or None


def is_mla(config: Mapping[str, Any]) -> bool:
    return _text_config(config).get("kv_lora_rank") is not None


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Layers that look at a window, or keep a state, so that vLLM groups their caches."""
    text = _text_config(config)
    kinds = set(text.get("layer_types") or ())
    windowed = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    return len(kinds) > 1 or (windowed and not kinds)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
