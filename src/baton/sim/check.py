"""Where the fake differs from real engines: the same requests to both, and what comes back compared in shape.

Texts, ids, numbers and times differ by nature and are not compared; keys, types, status codes, error messages (but for
the numbers in them), events and the ends of streams are.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster import TransferMode
from baton.sim.check_cases import Case, Step, cases
from baton.sim.judge import text_of
from baton.sim.lab import Lab, specs
from baton.sim.requests import RESPONSES, TICKET_KEY
from baton.sim.settings import EngineSettings

WAIT_SECONDS = 120.0
FREED_SECONDS = 45.0
METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_by_source",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:nixl_bytes_transferred",
    "vllm:nixl_xfer_time_seconds",
    "vllm:nixl_num_failed_transfers",
    "vllm:nixl_num_kv_expired_reqs",
)
"""Of vLLM's metrics those that somebody reads (docs/reference.md); of the others the fake has none."""

_COMPARED = (
    "finish_reason",
    "stop_reason",
    "status",
    "transfer_mode",
    "object",
    "do_remote_prefill",
    "do_remote_decode",
)
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Unreachable(Exception):
    """The real engines cannot be asked."""


@dataclass(frozen=True)
class Difference:
    """One thing that the fake does otherwise; *known* says why it may."""

    case: str
    where: str
    real: Any
    fake: Any
    known: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"case": self.case, "where": self.where, "real": self.real, "fake": self.fake, "known": self.known}

    def __str__(self) -> str:
        reason = f" (known: {self.known})" if self.known else ""
        return f"{self.case}: {self.where}: real {self.real!r}, fake {self.fake!r}{reason}"


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server, what they call their model, and who moves the KV cache."""

    prefill: str
    decode: str
    model: str
    mode: TransferMode = TransferMode.READ

    def url(self, to: str) -> str:
        return self.prefill if to == "P" else self.decode


async def observe(session: aiohttp.ClientSession, pair: Pair, case: Case) -> dict[str, Any]:
    """What comes back to the requests of *case*, in shape: path of a value -> its kind."""
    seen: dict[str, Any] = {}
    answers: list[Any] = []
    # Engines that push find the two legs by it.
    request_id = f"check-{secrets.token_hex(8)}" if pair.mode is TransferMode.WRITE else None
    for number, step in enumerate(case.steps):
        where = f"{number + 1}. {step.to} {step.path}"
        try:
            async with asyncio.timeout(step.leave if step.leave is not None else WAIT_SECONDS):
                status, kind, raw = await _send(session, pair, step, answers, request_id)
        except TimeoutError:
            seen[where] = "left"
            answers.append(None)
            continue
        seen[f"{where} status"] = status
        seen[f"{where} type"] = kind
        answers.append(_read(raw, kind))
        if step.path == "/metrics":
            names = {family.name for family in text_string_to_metric_families(raw.decode())}
            seen |= {f"{where} {name}": name in names for name in METRICS}
        elif kind == "text/event-stream":
            seen |= {f"{where} {key}": value for key, value in _stream_shape(raw).items()}
        elif answers[-1] is not None:
            seen |= {f"{where} {key}": value for key, value in shape(answers[-1]).items()}
        if step.same_as is not None and status == 200:
            texts = [text_of(step.path, answers[each]) for each in (number, step.same_as)]
            seen[f"{where} same text"] = texts[0] == texts[1]
    if case.frees:
        seen["KV cache of P is free"] = await _freed(session, pair)
    return seen


async def _send(
    session: aiohttp.ClientSession, pair: Pair, step: Step, answers: Sequence[Any], request_id: str | None
) -> tuple[int, str, bytes]:
    url = f"{pair.url(step.to)}{step.path}"
    if step.body is None:
        async with session.get(url) as response:
            return response.status, response.content_type, await response.read()
    body = {"model": step.model or pair.model, **step.body}
    if step.ticket is not None:
        body[TICKET_KEY] = {**((answers[step.ticket] or {}).get(TICKET_KEY) or {}), **step.changed}
    headers = {"content-type": "application/json"}
    if request_id is not None:
        headers["x-request-id"] = request_id
        if step.path == RESPONSES:
            # Where engines take it from the body alone (vllm 0.32).
            body["request_id"] = f"resp_{request_id}"
    async with session.post(url, data=orjson.dumps(body), headers=headers) as response:
        return response.status, response.content_type, await response.read()


def _read(raw: bytes, kind: str) -> Any:
    if kind != "application/json":
        return None
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


async def _freed(session: aiohttp.ClientSession, pair: Pair) -> bool:
    deadline = time.monotonic() + FREED_SECONDS
    while True:
        async with session.get(f"{pair.prefill}/metrics") as response:
            text = await response.text()
        used = sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:kv_cache_usage_perc"
        )
        if used == 0 or time.monotonic() > deadline:
            return used == 0
        await asyncio.sleep(0.1)


def shape(value: Any, path: str = "") -> dict[str, Any]:
    """The paths in a JSON value, each with its kind; of an error also the words, without the numbers in them."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= shape(inner, f"{path}.{key}" if path else key)
        return found or {path: "{}"}
    if isinstance(value, list):
        return shape(value[0], f"{path}[]") if value else {path: "[]"}
    return {path: _kind(value, path)}


def _kind(value: Any, path: str) -> Any:
    """A value that is compared as it is, or what kind it is of."""
    if path.startswith("error.") and value is not None:
        return _NUMBER.sub("#", str(value))
    if path.endswith(_COMPARED):
        return value
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "text"


def _stream_shape(raw: bytes) -> dict[str, Any]:
    """The kinds of events of a stream in their order, repeated ones once, and the shape of each."""
    kinds: list[str] = []
    found: dict[str, Any] = {}
    for event in raw.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in event.splitlines())
        data = lines.get("data", "")
        if not data:
            continue
        value = None if data == "[DONE]" else orjson.loads(data)
        shaped = {} if value is None else shape(value)
        finished = any(path.endswith("finish_reason") and end for path, end in shaped.items())
        kind = lines.get("event") or (
            "[DONE]" if value is None else f"event {len(shaped)}{' last' if finished else ''}"
        )
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        found |= {f"{kind}: {path}": what for path, what in shaped.items()}
    return {"events": kinds, **found}


def differences(case: Case, real: Mapping[str, Any], fake: Mapping[str, Any]) -> list[Difference]:
    """What is not the same."""
    found = []
    for where in {**real, **fake}:
        theirs, ours = real.get(where, "nothing"), fake.get(where, "nothing")
        if theirs != ours:
            known = next((why for part, why in case.known.items() if part in where), None)
            found.append(Difference(case.name, where, theirs, ours, known))
    return found


async def compare(prefill: str, decode: str, chosen: Sequence[Case] | None = None) -> list[Difference]:
    """Run the cases on real engines and on fakes that are made as they are.

    Raises:
        Unreachable: the real ones do not answer, or have no connector.
    """
    timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        settings = await _settings_of(session, prefill)
        real = Pair(prefill.rstrip("/"), decode.rstrip("/"), settings.model, settings.mode)
        lab = Lab(specs(1, 1, settings))
        await lab.start()
        try:
            fake = Pair(lab.engines["P0"].url, lab.engines["D0"].url, settings.model, settings.mode)
            found: list[Difference] = []
            if chosen is None:
                chosen = cases(settings.mode, bidirectional=settings.bidirectional, longest=settings.longest)
            for case in chosen:
                try:
                    seen = await observe(session, real, case)
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise Unreachable(f"{case.name}: the real engines do not answer: {error!r}") from error
                found += differences(case, seen, await observe(session, fake, case))
            return found
        finally:
            await lab.stop()


async def _settings_of(session: aiohttp.ClientSession, url: str) -> EngineSettings:
    """How a fake must be made to be like the engine at *url*."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            card = (await response.json())["data"][0]
        async with session.get(f"{url}/baton/engine") as response:
            said = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise Unreachable(f"{url} does not answer as an engine: {error!r}; is it up?") from error
    settings = EngineSettings(
        model=card["id"], max_model_len=card["max_model_len"], decode_step_seconds=0.02, baton=said is not None
    )
    if said is None:
        return settings
    if said.get("transfer_mode") not in ("pull", "push"):
        raise Unreachable(f"{url} has no KV connector: start it with baton engine --role prefill")
    mode = TransferMode.WRITE if said["transfer_mode"] == "push" else TransferMode.READ
    return replace(
        settings,
        block_size=said["block_size"],
        mode=mode,
        bidirectional=bool(said.get("bidirectional")),
        lease_seconds=said["kv_lease_seconds"],
    )
