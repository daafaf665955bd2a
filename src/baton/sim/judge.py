"""Whether an answer is one that a client may get: the right text, or an error that it can see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.sim.requests import CHAT, GENERATE, MESSAGES, RESPONSES
from baton.sim.text import WORDS, Text

_ENDS = {RESPONSES: "response.completed", MESSAGES: "message_stop"}


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client heard.

    Attributes:
        status: 0 when no head came.
        body: as much as came.
        whole: whether the framing says that this was all of it.
    """

    status: int
    body: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer is judged: ``right``, ``error`` (one that the client sees), or what is wrong with it."""

    word: str

    @property
    def wrong(self) -> bool:
        return self.word not in ("right", "error")


RIGHT, ERROR = Verdict("right"), Verdict("error")


def judge(path: str, stream: bool, right: Text, heard: Heard, *, refusals: bool) -> Verdict:
    """Judge an answer.

    Args:
        right: the right answer.
        refusals: whether a status of 4xx may come, beside 429: nothing is wrong with the request.
    """
    if heard.status == 0 or (heard.status == 200 and not stream and not heard.whole):
        return ERROR
    if heard.status != 200:
        return _judge_error(heard, refusals)
    return _judge_stream(path, right, heard) if stream else _judge_whole(path, right, heard)


def _judge_whole(path: str, right: Text, heard: Heard) -> Verdict:
    try:
        value = orjson.loads(heard.body)
    except orjson.JSONDecodeError:
        return Verdict("200 with a body that is not JSON")
    if "choices" not in value and value.get("error"):
        return Verdict("200 with an error")
    text = text_of(path, value)
    if not text:
        return Verdict("empty 200")
    return RIGHT if text == right.text else Verdict(f"wrong text: {text!r} instead of {right.text!r}")


def _judge_error(heard: Heard, refusals: bool) -> Verdict:
    if 400 <= heard.status < 500 and heard.status != 429 and not refusals:
        return Verdict(f"{heard.status} for a good request")
    try:
        value = orjson.loads(heard.body)
    except orjson.JSONDecodeError:
        return ERROR if not heard.whole else Verdict(f"{heard.status} with a body that is not JSON")
    return ERROR if isinstance(value, dict) and value.get("error") else Verdict(f"{heard.status} without an error")


def _judge_stream(path: str, right: Text, heard: Heard) -> Verdict:
    said, ended, failed = _read_stream(path, heard)
    if ended and not failed:
        if not said:
            return Verdict("empty 200")
        return RIGHT if said == right.text else Verdict(f"wrong text: {said!r} instead of {right.text!r}")
    if not right.text.startswith(said):
        return Verdict(f"wrong text before an error: {said!r} instead of {right.text!r}")
    if heard.whole and not failed:
        return Verdict("a stream without its end looks whole")
    return ERROR


def _read_stream(path: str, heard: Heard) -> tuple[str, bool, bool]:
    """The text of a stream, whether it has its end, and whether it says that it failed."""
    said, ended, failed = "", False, False
    events = heard.body.decode(errors="replace").split("\n\n")
    # What follows the last blank line is half an event.
    for event in events[:-1]:
        data = "".join(line.removeprefix("data: ") for line in event.split("\n") if line.startswith("data: "))
        if data == "[DONE]":
            ended = True
            continue
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            continue
        if value.get("error"):
            failed = True
            continue
        kind = value.get("type")
        ended = ended or (kind is not None and kind == _ENDS.get(path))
        failed = failed or kind == "response.failed"
        said += delta_of(path, value)
    return said, ended, failed


def text_of(path: str, value: Mapping[str, Any]) -> str:
    """The text of a whole answer."""
    if path == RESPONSES:
        return "".join(part["text"] for item in value["output"] for part in item["content"])
    if path == MESSAGES:
        return "".join(part["text"] for part in value["content"])
    choice = value["choices"][0]
    if path == CHAT:
        return str(choice["message"]["content"])
    return _words(choice) if path == GENERATE else str(choice["text"])


def delta_of(path: str, value: Mapping[str, Any]) -> str:
    """The text of one event."""
    if path == RESPONSES:
        return str(value["delta"]) if value.get("type") == "response.output_text.delta" else ""
    if path == MESSAGES:
        return str(value["delta"]["text"]) if value.get("type") == "content_block_delta" else ""
    choices = value.get("choices") or ()
    if not choices:
        return ""
    if path == CHAT:
        return str(choices[0]["delta"].get("content") or "")
    return _words(choices[0]) if path == GENERATE else str(choices[0]["text"])


def _words(choice: Mapping[str, Any]) -> str:
    return "".join(WORDS[number] for number in choice["token_ids"])
