"""Whether the engines of a cluster fit together: what would fail, or answer with garbage, at the first hand-off.

Pure: from what every engine will run with and the model's config to problems. What must be equal is what vllm 0.32
compares when two engines meet (distributed/kv_transfer/kv_connector/v1/nixl: ``compute_nixl_compatibility_hash`` in
metadata.py, ``_validate_remote_agent_handshake`` in base_worker.py), and what nobody
compares though both phases share it.
Values that only vLLM can tell (an ``auto`` that hangs on the device) are left to it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from baton.cluster import Cluster, Instance, Role
from baton.launch.commands import Command, flag_value
from baton.launch.problem import Problem

CPU_BLOCK = 128
"""Tokens a block on CPU unless something else is asked for (vllm 0.32, platforms/cpu.py)."""

HYBRID_OFF = "--disable-hybrid-kv-cache-manager"

_MODES = {"NixlConnector": "read", "NixlPullConnector": "read", "NixlPushConnector": "write"}
_DTYPES = {"float": "float32", "half": "float16"}
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


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


Check = Callable[[Plan], Iterator[Problem]]


def check_fits(cluster: Cluster, commands: Sequence[Command], device: str) -> list[Problem]:
    """What would keep the engines of *cluster* from working together.

    Args:
        commands: of its instances, in their order.
    """
    engines = tuple(Planned.of(*each) for each in zip(cluster.instances, commands, strict=True))
    return problems(Plan(engines, read_config(engines[0].model), device))


def problems(plan: Plan) -> list[Problem]:
    """What every check finds."""
    return [problem for check in CHECKS for problem in check(plan)]


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a model on this disk; empty when there is none."""
    try:
        value = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# what all engines share


def same_model(plan: Plan) -> Iterator[Problem]:
    """The weights, and what makes tokens of a prompt: both roles read it, and only the blocks travel."""
    yield from _same(plan, "--model", lambda engine: engine.flag("--model") or engine.model, "serve one model")
    for name in ("--revision", "--tokenizer", "--tokenizer-revision", "--chat-template"):
        why = "both roles must read a prompt as the same tokens, with the same weights"
        yield from _same(plan, name, partial(_given, name), why)


def served_names(plan: Plan) -> Iterator[Problem]:
    """Clients take a name from a decode server, and the prefill server must know it."""
    for prefill, decode in plan.pairs():
        unknown = [name for name in _names(decode) if name not in _names(prefill)]
        if unknown:
            yield _words(
                f"{decode.id} serves the model as {unknown[0]!r} and {prefill.id} as {', '.join(_names(prefill))}: "
                "a request's name must be known to both; give both the same --served-model-name"
            )
            return


def same_dtype(plan: Plan) -> Iterator[Problem]:
    """The hash holds the model's type and the cache's; their bytes would be read as others."""
    yield from _same(plan, "--dtype", lambda engine: _dtype(engine, plan), "the KV cache would not be understood")
    yield from _same(
        plan, "--kv-cache-dtype", lambda engine: _cache_dtype(engine, plan), "the KV cache would not be understood"
    )


def same_cache_manager(plan: Plan) -> Iterator[Problem]:
    """In the hash, which a decode server in read mode may be told not to enforce."""
    if any(engine.extra.get("enforce_handshake_compat") is False for engine in plan.engines):
        return
    why = "vLLM refuses such a pair at its first hand-off"
    yield from _same(plan, HYBRID_OFF, lambda engine: _hybrid_off(engine, plan), why)
    yield from _same(plan, "--attention-backend", lambda engine: engine.flag("--attention-backend"), why)


def block_sizes(plan: Plan) -> Iterator[Problem]:
    """Whoever starts the transfer may have blocks that are a multiple of the other's, but not on CPU.

    Measured on CPU in read mode (vllm 0.32): 64 on decode and 32 on prefill answers every request with garbage and
    status 200; 32 on decode and 64 on prefill fails every request.
    """
    for prefill, decode in plan.pairs():
        sizes = _block_size(prefill, plan), _block_size(decode, plan)
        if None in sizes or sizes[0] == sizes[1]:
            continue
        starts, other = (decode, prefill) if decode.mode == "read" else (prefill, decode)
        large, small = _block_size(starts, plan), _block_size(other, plan)
        assert large is not None and small is not None
        text = f"--block-size is {sizes[0]} on {prefill.id} and {sizes[1]} on {decode.id}: "
        if plan.device == "cpu":
            yield _words(f"{text}on CPU the blocks would be read wrong; give both the same")
            return
        if large % small:
            yield _words(f"{text}{starts.id}'s must be a multiple of {other.id}'s; give both the same")
            return
        if _tensor_parallel(prefill) > _tensor_parallel(decode) and not _is_mla(plan.config):
            yield _words(
                f"{text}with a larger --tensor-parallel-size on {prefill.id} ({_tensor_parallel(prefill)}) than on "
                f"{decode.id} ({_tensor_parallel(decode)}) they must be equal; give both the same"
            )
            return


def context_lengths(plan: Plan) -> Iterator[Problem]:
    """A prompt that prefill takes and decode refuses leaves its blocks pinned until the lease ends.

    The other way round works: what is too long for prefill is refused before anything is held. Within a role whether a
    prompt is taken must not hang on whose turn it is.
    """
    for role in Role:
        first, *others = plan.of_role(role)
        for engine in others:
            lengths = _length(first, plan), _length(engine, plan)
            if None not in lengths and lengths[0] != lengths[1]:
                yield _words(
                    f"--max-model-len is {lengths[0]} on {first.id} and {lengths[1]} on {engine.id}: whether a prompt "
                    "is taken would hang on whose turn it is; give both the same"
                )
                return
    for prefill, decode in plan.pairs():
        ours, theirs = _length(prefill, plan), _length(decode, plan)
        if ours is not None and theirs is not None and ours > theirs:
            yield _words(
                f"--max-model-len is {ours} on {prefill.id} and {theirs} on {decode.id}: {decode.id} would refuse "
                f"prompts that {prefill.id} has computed and holds; give {decode.id} at least as much"
            )
            return


# how the KV cache travels


def one_transfer_mode(plan: Plan) -> Iterator[Problem]:
    """In the hash: push and pull are protocols of their own."""
    first, *others = plan.engines
    for engine in others:
        if engine.mode != first.mode:
            yield _words(
                f"{first.id} is in {first.mode} mode ({first.transfer.get('kv_connector')}) and {engine.id} in "
                f"{engine.mode} mode ({engine.transfer.get('kv_connector')}): all engines of a cluster share one"
            )
            return


def write_mode_is_one_way(plan: Plan) -> Iterator[Problem]:
    """vllm 0.32, nixl/push_scheduler.py."""
    for engine in plan.engines:
        if engine.mode == "write" and engine.extra.get("bidirectional_kv_xfer"):
            yield _words(
                f"{engine.id} is in write mode and bidirectional_kv_xfer is true: the KV cache goes both ways only in "
                "read mode; drop one of them"
            )
            return


def pipelines(plan: Plan) -> Iterator[Problem]:
    """vllm 0.32, nixl/base_worker.py: no decode server in a pipeline, and no hybrid cache in one that is read from."""
    for engine in plan.engines:
        stages = _whole(engine.flag("--pipeline-parallel-size", "-pp")) or 1
        if stages == 1:
            continue
        if engine.role is Role.DECODE:
            yield _words(
                f"--pipeline-parallel-size is {stages} on {engine.id}: a decode server takes KV in only with 1; use "
                "--tensor-parallel-size there"
            )
            return
        if engine.mode == "read" and _is_hybrid(plan.config) and not engine.has(HYBRID_OFF):
            yield _words(
                f"--pipeline-parallel-size is {stages} on {engine.id}, and the model's layers have caches of several "
                "kinds: read mode does not do that; use 1, or write mode"
            )
            return


def own_engine_ids(plan: Plan) -> Iterator[Problem]:
    """A decode server knows its peers by it: two of one name are one to it, and it reads the wrong memory."""
    given = [(engine.id, engine.transfer["engine_id"]) for engine in plan.engines if engine.transfer.get("engine_id")]
    for name, count in Counter(each for _, each in given).items():
        if count > 1:
            owners = " and ".join(owner for owner, each in given if each == name)
            yield _words(
                f"engine_id {name!r} in --kv-transfer-config is given to {owners}: each engine needs one of its own; "
                "leave it out, vLLM makes one"
            )


CHECKS: tuple[Check, ...] = (
    same_model,
    served_names,
    same_dtype,
    same_cache_manager,
    block_sizes,
    context_lengths,
    one_transfer_mode,
    write_mode_is_one_way,
    pipelines,
    own_engine_ids,
)
"""All checks; a new one is a function more."""


# reading flags


def _same(plan: Plan, name: str, value: Callable[[Planned], str | None], why: str) -> Iterator[Problem]:
    """A problem when two engines say different things; None says nothing."""
    said = [(engine, found) for engine in plan.engines if (found := value(engine)) is not None]
    for engine, found in said[1:]:
        first, expected = said[0]
        if found != expected:
            yield _words(
                f"{name} is {expected} on {first.id} and {found} on {engine.id}: {why}; give both the same {name}"
            )
            return


def _given(name: str, engine: Planned) -> str:
    return engine.flag(name) or "its default"


def _words(what: str) -> Problem:
    return Problem(what, words=True)


def _names(engine: Planned) -> list[str]:
    """What an engine calls its model; the last --served-model-name wins, and it takes several."""
    names = [engine.model]
    for index, word in enumerate(engine.args):
        if word == "--served-model-name":
            following = engine.args[index + 1 :]
            end = next((at for at, each in enumerate(following) if each.startswith("-")), len(following))
            names = list(following[:end])
        elif word.startswith("--served-model-name="):
            names = [word.partition("=")[2]]
    return names


def _hybrid_off(engine: Planned, plan: Plan) -> str | None:
    """Unasked it is off on CPU; on other devices vLLM looks at the platform."""
    given = engine.has(HYBRID_OFF)
    if given is None:
        return "off" if plan.device == "cpu" else None
    return "on" if given else "off"


def _dtype(engine: Planned, plan: Plan) -> str | None:
    """The type that an engine computes in, or None when only vLLM can tell."""
    given = (engine.flag("--dtype") or "auto").lower()
    if given != "auto":
        return _DTYPES.get(given, given)
    stored = str(plan.config.get("dtype") or plan.config.get("torch_dtype") or "").removeprefix("torch.")
    # A model in float32 is served in what the device prefers: bfloat16 on CPU, but for Macs (platforms/cpu.py).
    if stored == "float32" and plan.device == "cpu" and sys.platform == "linux":
        return "bfloat16"
    return stored if stored in ("bfloat16", "float16") else None


def _cache_dtype(engine: Planned, plan: Plan) -> str | None:
    """As the hash has it: ``auto`` and the type that it comes to are not the same to vLLM."""
    given = engine.flag("--kv-cache-dtype") or "auto"
    return None if given == "auto" and plan.config.get("quantization_config") else given


def _block_size(engine: Planned, plan: Plan) -> int | None:
    """Tokens a block, or None when only vLLM can tell."""
    if _is_mla(plan.config) or _has_state(plan.config):
        return None
    given = engine.flag("--block-size")
    if given is None:
        return CPU_BLOCK if plan.device == "cpu" else None
    return _whole(given)


def _length(engine: Planned, plan: Plan) -> int | None:
    """Tokens of prompt and answer together, or None when only vLLM can tell."""
    given = engine.flag("--max-model-len")
    if given is None:
        own = plan.config.get("max_position_embeddings")
        rope = plan.config.get("rope_scaling") or plan.config.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "?"
        plain = kind == "default" and engine.flag("--hf-overrides") is None
        return own if isinstance(own, int) and plain else None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", given.strip())
    return int(float(match[1]) * _MULTIPLES.get(match[2], 1)) if match else None


def _tensor_parallel(engine: Planned) -> int:
    return _whole(engine.flag("--tensor-parallel-size", "-tp")) or 1


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) else None


def _is_mla(config: Mapping[str, Any]) -> bool:
    return _text_config(config).get("kv_lora_rank") is not None


def _has_state(config: Mapping[str, Any]) -> bool:
    """Layers that keep a state and not a cache: their pages decide on the block size."""
    kinds = _text_config(config).get("layer_types") or ()
    return any("attention" not in str(kind) or "linear" in str(kind) for kind in kinds)


def _is_hybrid(config: Mapping[str, Any]) -> bool:
    """Layers that look at a window, or keep a state, so that vLLM groups their caches."""
    text = _text_config(config)
    kinds = set(text.get("layer_types") or ())
    windowed = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    return len(kinds) > 1 or (windowed and not kinds)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
