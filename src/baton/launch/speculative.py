"""Whether the roles' speculative decoding fits together: what would fail at the first hand-off, told before a start.

A draft that keeps a KV cache has it filled by prefill, like the target's. So vLLM puts its settings into the hash that
both engines compare at their first handshake (vllm 0.32, nixl/metadata.py), and a difference fails every request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.cluster import Cluster, Role
from baton.launch.commands import flag_value, json_flag
from baton.launch.errors import LaunchError

FLAG = "--speculative-config"
_SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_ALIKE = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
"""What must be the same on both. The number of drafted tokens is not among them: prefill's drafts are thrown away."""

_WITHOUT_KV = {"ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"}
"""Methods whose drafts come from the text or from the last hidden state alone: decode may use them by itself."""


def check_speculative(cluster: Cluster) -> list[str]:
    """What a pair of *cluster* would refuse to hand over for, a line each; an empty list when all is well."""
    prefills, decodes = (dict.fromkeys(each.engine_args for each in cluster.of_role(role)) for role in Role)
    lines = [line for prefill in prefills for decode in decodes for line in mismatches(prefill, decode)]
    return list(dict.fromkeys(lines))


def mismatches(prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """A line for each setting of the draft in which two roles' vLLM flags differ and may not."""
    try:
        ours, theirs = settings(prefill), settings(decode)
    except LaunchError as error:
        return [str(error)]
    if not (_keeps_kv(ours) or _keeps_kv(theirs)):
        return []
    if not ours or not theirs:
        with_draft, without = (Role.PREFILL, Role.DECODE) if ours else (Role.DECODE, Role.PREFILL)
        draft = _method(ours or theirs)
        return [
            f"{with_draft} drafts with {draft!r} and {without} has no {FLAG}: the draft's KV cache is handed over "
            f"like the model's, so give both roles the same {FLAG} (after --), or none"
        ]
    return [
        f"{FLAG} says {key} {ours.get(key)!r} for prefill and {theirs.get(key)!r} for decode: the draft's KV cache "
        "is handed over like the model's, so give both roles the same"
        for key in _ALIKE
        if _differs(key, ours, theirs)
    ]


def settings(args: Sequence[str]) -> dict[str, Any]:
    """The speculative settings in vLLM's flags, by the keys of its JSON object; empty without any.

    As one JSON object (``--speculative-config``, ``-sc``), key by key (``--speculative-config.model``), or by the short
    flags (``--spec-model``).

    Raises:
        LaunchError: it is no JSON object.
    """
    given = {**json_flag(args, "-sc"), **json_flag(args, FLAG)}
    dotted = {word.partition("=")[0] for word in args if word.startswith(f"{FLAG}.")}
    for name in sorted(dotted):
        given[name.removeprefix(f"{FLAG}.")] = flag_value(args, name)
    for name, key in _SHORT.items():
        if (value := flag_value(args, name)) is not None:
            given[key] = value
    found = {key.replace("-", "_"): value for key, value in given.items()}
    if found:
        # The draft's cache has the model's type unless it is told another.
        found["kv_cache_dtype"] = found.get("kv_cache_dtype") or flag_value(args, "--kv-cache-dtype") or "auto"
        found["parallel_drafting"] = str(found.get("parallel_drafting", False)).lower() == "true"
    return found


def _method(given: Mapping[str, Any]) -> str | None:
    """The method by its name of today; None when vLLM would find it out from the draft's own files."""
    method = given.get("method")
    if method is None and given.get("model") in ("ngram", "[ngram]"):
        return "ngram"
    return "mtp" if str(method).endswith("_mtp") else method


def _keeps_kv(given: Mapping[str, Any]) -> bool:
    """Whether the draft surely has a KV cache of its own."""
    return _method(given) is not None and _method(given) not in _WITHOUT_KV


def _differs(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if key == "method":
        return None not in (_method(ours), _method(theirs)) and _method(ours) != _method(theirs)
    if key == "model" and "mtp" in (_method(ours), _method(theirs)):
        # The draft is a part of the model itself, which may be named or not.
        return None not in (ours.get(key), theirs.get(key)) and ours.get(key) != theirs.get(key)
    return ours.get(key) != theirs.get(key)
