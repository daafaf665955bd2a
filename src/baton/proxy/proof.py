"""One small hand-off of a pair, and the proof that a KV cache was really moved.

A fleet that looks disaggregated and isn't answers every request rightly and pays each prefill twice: nothing but the
engines' own counters tells. Where they have none, the answer's count of cached tokens does: no cache holds the prompt.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from baton.cluster import Role, TransferMode
from baton.http import Header
from baton.proxy import engine_info, legs
from baton.proxy.answers import failed
from baton.proxy.compatibility import About, differences
from baton.proxy.errors import JSON, ProxyError
from baton.proxy.fleet import ProxyInstance
from baton.proxy.journey import Way
from baton.proxy.release import LINGER_SECONDS
from baton.proxy.ticket import Ticket
from baton.proxy.transfer_policy import Cause, Failed
from baton.proxy.transfers import counts_of
from baton.proxy.upstream import Answer, read_answer

PATH = "/v1/completions"
SHOWN = 200
"""Characters of an engine's refusal that are logged."""
COUNT_SECONDS = 10.0
"""How long an engine may take to publish what it counted."""
LOOK_SECONDS = 0.1


class Proof(enum.StrEnum):
    """How sure it is that a pair hands over."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    """It works, and nobody can know whether a KV cache was moved: the engines count nothing."""


async def hand_over(way: Way, prefill: ProxyInstance, decode: ProxyInstance, headers: Sequence[Header]) -> Proof:
    """Have *prefill* compute a short prompt that no cache holds, and *decode* fetch it and make one token.

    Raises:
        Failed: one of them refused, gave no ticket, or moved nothing; or they cannot hand over to each other.
        ProxyError: one of them cannot be reached, broke off or took too long.
    """
    ours, theirs = await asyncio.gather(*(about(way, each, headers) for each in (prefill, decode)))
    check_fit(way, (prefill, ours), (decode, theirs))
    rules = legs.RULES[PATH]
    prompt = secrets.token_hex(16)
    body = {"model": await model_of(way, prefill, headers), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    both = [JSON, *headers, (b"x-request-id", b"warm-up-" + secrets.token_hex(8).encode())]
    mover = prefill if way.fleet.mode is TransferMode.WRITE else decode
    before = await counts_of(way.upstream, mover, headers)

    # prefill
    raw = legs.written(legs.prefill_leg(body, rules))
    async with way.upstream.post(prefill, PATH.encode(), both, (raw,)) as response:
        ticket = Ticket.from_answer(good(prefill, await read_answer(response)), time.monotonic())
    if ticket is None:
        raise without_ticket(prefill, ours)

    # decode
    pieces = legs.decode_body(legs.written(body), ticket, keep_blocks=False)
    async with way.upstream.post(decode, PATH.encode(), both, pieces, linger_seconds=LINGER_SECONDS) as response:
        answer = good(decode, await read_answer(response))

    # proof
    if before is None:
        return by_usage(decode, answer)
    deadline = time.monotonic() + COUNT_SECONDS
    while time.monotonic() < deadline:
        after = await counts_of(way.upstream, mover, headers)
        if after is not None and after.moved_since(before):
            return Proof.PROVEN
        await asyncio.sleep(LOOK_SECONDS)
    raise Failed(
        Cause.DECODE_COMPUTED,
        f"{decode.id} answered, and {mover.id} moved no KV cache: {decode.id} computed the prompt itself "
        "(has it a KV connector, and does kv_transfer_params reach it?)",
    )


def check_fit(
    way: Way, prefill: tuple[ProxyInstance, About | None], decode: tuple[ProxyInstance, About | None]
) -> None:
    """
    Raises:
        Failed: what the two say of themselves rules a hand-off out.
    """
    for instance, said in (prefill, decode):
        if said is not None and said.get("transfer_mode") is None:
            raise Failed(
                Cause.NO_CONNECTOR, f"{instance.id} has no KV connector: it was started without --kv-transfer-config"
            )
        role = instance.endpoint.role
        if said is not None and said.get("role") not in (None, "kv_both", role.kv_role):
            raise Failed(
                Cause.WRONG_ROLE,
                f"{instance.id} is named as a {role} server and was started as another (kv_role {said['role']}): "
                "are the two swapped?",
            )
    if prefill[1] is not None and decode[1] is not None:
        found = differences((prefill[0].id, prefill[1]), (decode[0].id, decode[1]), way.fleet.mode)
        if found:
            raise Failed(Cause.INCOMPATIBLE, f"their KV caches do not fit together: {'; '.join(found)}")


def without_ticket(prefill: ProxyInstance, said: About | None) -> Failed:
    """Why *prefill* may have given none."""
    if said is not None:
        return Failed(
            Cause.PARAMS_DROPPED,
            f"{prefill.id} gave no ticket though it has a KV connector: something on the way to it drops "
            "kv_transfer_params",
        )
    return Failed(
        Cause.NO_CONNECTOR,
        f"{prefill.id} gave no ticket: is it started as a prefill server, with a KV connector (--kv-transfer-config), "
        "and does kv_transfer_params reach it?",
    )


def by_usage(decode: ProxyInstance, answer: Any) -> Proof:
    """What the answer's usage says of where the prompt's KV cache came from.

    Raises:
        Failed: it was computed.
    """
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if not isinstance(cached, int):
        return Proof.UNPROVEN
    if cached > 0:
        return Proof.PROVEN
    raise Failed(Cause.DECODE_COMPUTED, f"{decode.id} computed the prompt itself: it says that no token was cached")


async def about(way: Way, instance: ProxyInstance, headers: Sequence[Header]) -> About | None:
    """What an engine says of itself; None when it is a stock one.

    Raises:
        ProxyError: it cannot be reached, or broke off.
    """
    async with way.upstream.get(instance, engine_info.PATH, headers) as response:
        answer = await read_answer(response)
    if answer.status != 200:
        return None
    try:
        value = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and "transfer_mode" in value else None


async def model_of(way: Way, instance: ProxyInstance, headers: Sequence[Header]) -> str:
    """The first model that an engine names.

    Raises:
        Failed: it names none.
        ProxyError: it cannot be reached, or broke off.
    """
    async with way.upstream.get(instance, b"/v1/models", headers) as response:
        value = good(instance, await read_answer(response))
    try:
        return str(value["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise Failed(Cause.WRONG_ENDPOINT, f"{instance.id} names no model at /v1/models") from None


def good(instance: ProxyInstance, answer: Answer) -> Any:
    """An engine's answer, read.

    Raises:
        Failed: it is a refusal, says that generation failed, or is not JSON.
    """
    if answer.status != 200 or failed(answer.body):
        shown = answer.body.decode(errors="replace")[:SHOWN]
        said = f"{instance.id} answered {answer.status}{hint(instance, answer.status)}: {shown}"
        raise Failed(cause_of(instance, answer.status), said)
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise Failed(Cause.WRONG_ENDPOINT, f"{instance.id} answered what is not JSON") from None


def cause_of(instance: ProxyInstance, status: int) -> Cause:
    if status in (404, 405, 501):
        return Cause.WRONG_ENDPOINT
    return Cause.PREFILL_REFUSED if instance.endpoint.role is Role.PREFILL else Cause.DECODE_REFUSED


def hint(instance: ProxyInstance, status: int) -> str:
    """What a status says about how the engine was set up."""
    match status:
        case 401:
            return ": it asks for a key, see --engine-api-key"
        case 404 | 405:
            return ": is that an engine's address?"
        case 500 if instance.endpoint.role is Role.DECODE:
            # vLLM's answer says no more than that it failed.
            return (
                ": if it could not load the KV cache, its log says why after 'NIXL transfer failure' (a side channel "
                "that cannot be reached, or engines that do not fit together)"
            )
    return ""


def cause_of_error(error: ProxyError) -> Cause:
    """What kept a leg from being answered."""
    return {503: Cause.WRONG_ENDPOINT, 504: Cause.TOO_SLOW}.get(error.status, Cause.BROKEN)
