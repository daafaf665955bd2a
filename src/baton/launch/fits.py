"""Whether the engines of a cluster fit together: what would fail, or answer with garbage, at the first hand-off.

Pure: from what every engine will run with and the model's config to problems. What must be equal is what vllm 0.32
compares when two engines meet (distributed/kv_transfer/kv_connector/v1/nixl: ``compute_nixl_compatibility_hash`` in
metadata.py, ``_validate_remote_agent_handshake`` in base_worker.py), and what nobody compares though both phases share
it. Values that only vLLM can tell (an ``auto`` that hangs on the device) are left to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from baton.cluster import Cluster, Role
from baton.launch.commands import Command, flag_value
from baton.launch.model_config import has_state, read_config
from baton.launch.planned import (
    HYBRID_OFF,
    Plan,
    Planned,
    block_size,
    cache_dtype,
    dtype,
    hybrid_off,
    is_hybrid,
    is_mla,
    kinds_of,
    length,
    names,
    tensor_parallel,
    whole,
)
from baton.launch.problem import Problem

Check = Callable[[Plan], Iterator[Problem]]


def check_fits(cluster: Cluster, commands: Sequence[Command], device: str) -> list[Problem]:
    """What would keep the engines of *cluster* from working together.

    Args:
        commands: of its instances, in their order.
    """
    # Checks look at every pair; engines that are alike need one look.
    engines = tuple(Planned.of(*each) for each in kinds_of(cluster, commands))
    return problems(Plan(engines, read_config(Path(engines[0].model)), device))


def check_alone(command: Command, device: str) -> list[Problem]:
    """What would keep one engine from working with any other."""
    transfer = json.loads(flag_value(command.argv, "--kv-transfer-config") or "{}")
    role = next((role for role in Role if role.kv_role == transfer.get("kv_role")), Role.PREFILL)
    engine = Planned(f"this {role} server", role, command.argv[3], tuple(command.argv[4:]), transfer)
    made = Plan((engine,), read_config(Path(engine.model)), device)
    return [problem for check in ALONE for problem in check(made)]


def problems(plan: Plan) -> list[Problem]:
    """What every check finds."""
    return [problem for check in CHECKS for problem in check(plan)]


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
        unknown = [name for name in names(decode) if name not in names(prefill)]
        if unknown:
            yield _words(
                f"{decode.id} serves the model as {unknown[0]!r} and {prefill.id} as {', '.join(names(prefill))}: "
                "a request's name must be known to both; give both the same --served-model-name"
            )
            return


def same_dtype(plan: Plan) -> Iterator[Problem]:
    """The hash holds the model's type and the cache's; their bytes would be read as others."""
    yield from _same(plan, "--dtype", lambda engine: dtype(engine, plan), "the KV cache would not be understood")
    yield from _same(
        plan, "--kv-cache-dtype", lambda engine: cache_dtype(engine, plan), "the KV cache would not be understood"
    )


def same_cache_manager(plan: Plan) -> Iterator[Problem]:
    """In the hash, which a decode server in read mode may be told not to enforce."""
    if any(engine.extra.get("enforce_handshake_compat") is False for engine in plan.engines):
        return
    why = "vLLM refuses such a pair at its first hand-off"
    yield from _same(plan, HYBRID_OFF, lambda engine: hybrid_off(engine, plan), why)
    yield from _same(plan, "--attention-backend", lambda engine: engine.flag("--attention-backend"), why)


def block_sizes(plan: Plan) -> Iterator[Problem]:
    """Whoever starts the transfer may have blocks that are a multiple of the other's, but not on CPU.

    Measured on CPU in read mode (vllm 0.32): 64 on decode and 32 on prefill answers every request with garbage and
    status 200; 32 on decode and 64 on prefill fails every request.
    """
    for prefill, decode in plan.pairs():
        sizes = block_size(prefill, plan), block_size(decode, plan)
        if None in sizes or sizes[0] == sizes[1]:
            continue
        starts, other = (decode, prefill) if decode.mode == "read" else (prefill, decode)
        large, small = block_size(starts, plan), block_size(other, plan)
        assert large is not None and small is not None
        text = f"--block-size is {sizes[0]} on {prefill.id} and {sizes[1]} on {decode.id}: "
        if plan.device == "cpu":
            yield _words(f"{text}on CPU the blocks would be read wrong; give both the same")
            return
        if large % small:
            yield _words(f"{text}{starts.id}'s must be a multiple of {other.id}'s; give both the same")
            return
        if tensor_parallel(prefill) > tensor_parallel(decode) and not is_mla(plan.config):
            yield _words(
                f"{text}with a larger --tensor-parallel-size on {prefill.id} ({tensor_parallel(prefill)}) than on "
                f"{decode.id} ({tensor_parallel(decode)}) they must be equal; give both the same"
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
            lengths = length(first, plan), length(engine, plan)
            if None not in lengths and lengths[0] != lengths[1]:
                yield _words(
                    f"--max-model-len is {lengths[0]} on {first.id} and {lengths[1]} on {engine.id}: whether a prompt "
                    "is taken would hang on whose turn it is; give both the same"
                )
                return
    for prefill, decode in plan.pairs():
        ours, theirs = length(prefill, plan), length(decode, plan)
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
    """vllm 0.32, nixl/base_worker.py: no decode server in a pipeline, and no hybrid cache in one that is read from.

    On CPU, without compilation, the first request kills any engine in a pipeline: the buffers of its second stage are
    made by a trial run that is left out there (v1/worker/cpu_model_runner.py, gpu_model_runner.py; measured).
    """
    for engine in plan.engines:
        stages = whole(engine.flag("--pipeline-parallel-size", "-pp")) or 1
        if stages == 1:
            continue
        if engine.role is Role.DECODE:
            yield _words(
                f"--pipeline-parallel-size is {stages} on {engine.id}: a decode server takes KV in only with 1; use "
                "--tensor-parallel-size there"
            )
            return
        if plan.device == "cpu" and engine.has("--enforce-eager"):
            yield _words(
                f"--pipeline-parallel-size is {stages} on {engine.id}, which on CPU its first request would kill; use "
                "--tensor-parallel-size"
            )
            return
        if engine.mode == "read" and is_hybrid(plan.config) and not engine.has(HYBRID_OFF):
            yield _words(
                f"--pipeline-parallel-size is {stages} on {engine.id}, and the model's layers have caches of several "
                "kinds: read mode does not do that; use 1, or write mode"
            )
            return


def states(plan: Plan) -> Iterator[Problem]:
    """Layers that keep a state: what is known to end an engine, or to make answers vary and say nothing.

    A cached prefix has blocks and no state beside them: the second prompt that begins like the first has ended decode
    servers. With several ranks asynchronous scheduling lets the state run ahead.
    """
    if not has_state(plan.config):
        return
    for engine in plan.engines:
        if engine.has("--enable-prefix-caching") is not False:
            yield _words(
                f"the model's layers keep a state, and prefix caching is on on {engine.id}: prompts that begin "
                "alike have ended decode servers with it; add --no-enable-prefix-caching for all engines"
            )
            return
    for engine in plan.engines:
        ranks = tensor_parallel(engine)
        if ranks > 1 and engine.has("--async-scheduling") is not False:
            yield _words(
                f"the model's layers keep a state, and --tensor-parallel-size is {ranks} on {engine.id}: answers vary "
                "with asynchronous scheduling; add --no-async-scheduling"
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
    states,
    own_engine_ids,
)
"""All checks; a new one is a function more."""

ALONE: tuple[Check, ...] = (write_mode_is_one_way, pipelines, states)
"""Those that look at one engine at a time."""


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
