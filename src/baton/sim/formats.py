"""What an engine's answers look like, endpoint by endpoint: as JSON and as events, with vLLM's keys (0.32). Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.sim.requests import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, TICKET_KEY, Job
from baton.sim.text import WORDS, Text

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "baton-sim"
_IDS = {word: number for number, word in enumerate(WORDS)}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a request: of its prompt, of them cached, and of its answers."""

    prompt: int
    cached: int
    answer: int


class Format:
    """How one request is answered. One object a request: some endpoints number their events."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.created = int(time.time())

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        """The answer in one piece; *texts* prompt by prompt."""
        raise NotImplementedError

    def start(self, counts: Counts) -> list[bytes]:
        """The events before the first token of any choice."""
        return []

    def begin(self, index: int) -> list[bytes]:
        """The events before a choice's first token."""
        return []

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        """The event of one token; *finish* with a choice's last."""
        raise NotImplementedError

    def end(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> list[bytes]:
        """The events after the last token of all choices, the end of the stream among them.

        Args:
            ticket: shown where vLLM shows it by itself; a Baton engine puts it on top as well (:func:`with_ticket`).
        """
        raise NotImplementedError


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    data = b"data: %b\n\n" % orjson.dumps(value)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def error_events(path: str, message: str = "Internal server error") -> list[bytes]:
    """How a stream ends whose generation failed."""
    if path == MESSAGES:
        return [event({"type": "error", "error": {"type": "InternalServerError", "message": message}}, "error")]
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    failure = event({"error": error})
    return [failure] if path == RESPONSES else [failure, DONE]


def _usage(counts: Counts, *, stream: bool = False) -> Json:
    details: Json = {"cached_tokens": counts.cached}
    if not stream:
        details |= {"created_cache_tokens": None, "multimodal_tokens": None}
    usage: Json = {
        "prompt_tokens": counts.prompt,
        "total_tokens": counts.prompt + counts.answer,
        "completion_tokens": counts.answer,
        "prompt_tokens_details": details,
    }
    return usage if stream else {**usage, "completion_tokens_details": None}


def with_ticket(events: list[bytes], ticket: Mapping[str, Any]) -> list[bytes]:
    """The last events of a stream, with the ticket on top of the last that is JSON, where a Baton engine puts it."""
    made = list(events)
    place = len(made) - 1 - (made[-1] == DONE)
    made[place] = b'%b,"%b":%b}\n\n' % (made[place].rstrip()[:-1], TICKET_KEY.encode(), orjson.dumps(ticket))
    return made


class _OpenAI(Format):
    """What completions and chat have in common: chunks with one envelope, written by hand since there are many."""

    kind = ""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._head = orjson.dumps(
            {"id": job.name, "object": self.kind, "created": self.created, "model": job.model}
        ).removesuffix(b"}")

    def _chunk(self, choices: bytes, rest: bytes = b"") -> bytes:
        return b'data: %b,"choices":[%b]%b}\n\n' % (self._head, choices, rest)

    def end(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> list[bytes]:
        if not self.job.usage:
            return [DONE]
        usage = orjson.dumps(_usage(counts, stream=True))
        return [self._chunk(b"", b',"usage":%b,"system_fingerprint":"%b"' % (usage, FINGERPRINT.encode())), DONE]


class Completions(_OpenAI):
    """``/v1/completions``"""

    kind = "text_completion"

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        choices = [
            {
                "index": index,
                "text": self._echoed(index) + text.text,
                "logprobs": None,
                "finish_reason": text.finish,
                "stop_reason": text.stop,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
            for index, text in enumerate(texts)
        ]
        return {
            "id": self.job.name,
            "object": self.kind,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage(counts),
            TICKET_KEY: ticket,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _echoed(self, index: int) -> str:
        return self.job.texts[index // self.job.samples] if self.job.echo else ""

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        # Words hold nothing that JSON would escape.
        return self._chunk(
            b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,'
            b'"token_ids":null}' % (index, token.encode(), b"null" if finish is None else b'"%b"' % finish.encode()),
            b"" if finish is None or self.job.usage else b',"system_fingerprint":"baton-sim"',
        )


class Chat(_OpenAI):
    """``/v1/chat/completions``"""

    kind = "chat.completion.chunk"

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": text.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": text.finish,
                "stop_reason": text.stop,
                "token_ids": None,
                "routed_experts": None,
            }
            for index, text in enumerate(texts)
        ]
        return {
            "id": self.job.name,
            "object": "chat.completion",
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage(counts),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            TICKET_KEY: ticket,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def begin(self, index: int) -> list[bytes]:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return [self._chunk(choice, b',"prompt_token_ids":null,"prompt_text":null')]

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        end = b'null,"token_ids":null}' if finish is None else b'"%b","stop_reason":null,"token_ids":null}'
        return self._chunk(
            b'{"index":%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":' % (index, token.encode())
            + (end if finish is None else end % finish.encode()),
            b"" if finish is None or self.job.usage else b',"system_fingerprint":"baton-sim"',
        )


class Generate(Format):
    """``/inference/v1/generate``: tokens in, tokens out."""

    def _choice(self, index: int, tokens: Sequence[str], finish: str | None, total: int) -> Json:
        versions = None if finish is None else [{"version": "default", "start": 0, "end": total}]
        return {
            "index": index,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [_IDS.get(token, 0) for token in tokens],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": versions,
            "logprobs": None,
        }

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        return {
            "request_id": self.job.name,
            "model": self.job.model,
            "created": self.created,
            "usage": _usage(counts),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            TICKET_KEY: ticket,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [
                self._choice(index, text.tokens, text.finish, len(text.tokens)) for index, text in enumerate(texts)
            ],
        }

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        choice = self._choice(index, [token], finish, 1)
        return event({"request_id": self.job.name, "usage": None, "output_mode": "tokens", "choices": [choice]})

    def end(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> list[bytes]:
        return [DONE]


class Messages(Format):
    """``/v1/messages``"""

    @staticmethod
    def _usage(counts: Counts) -> Json:
        return {
            "input_tokens": counts.prompt - counts.cached,
            "output_tokens": counts.answer,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
        }

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        answer: Json = {
            "id": self.job.name,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": texts[0].text}],
            "model": self.job.model,
            "stop_reason": "max_tokens" if texts[0].finish == "length" else "end_turn",
            "usage": self._usage(counts),
        }
        return answer if ticket is None else {**answer, TICKET_KEY: ticket}

    def start(self, counts: Counts) -> list[bytes]:
        message: Json = {
            "id": self.job.name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.job.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": counts.prompt, "output_tokens": 0},
        }
        return [event({"type": "message_start", "message": message}, "message_start")]

    def begin(self, index: int) -> list[bytes]:
        value = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": index}
        return [event(value, "content_block_start")]

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        delta = {"type": "text_delta", "text": token}
        return event({"type": "content_block_delta", "delta": delta, "index": index}, "content_block_delta")

    def end(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> list[bytes]:
        reason = "max_tokens" if texts[0].finish == "length" else "end_turn"
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": self._usage(counts),
        }
        return [
            event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
            event(delta, "message_delta"),
            event({"type": "message_stop"}, "message_stop"),
        ]


class Responses(Format):
    """``/v1/responses``"""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._number = 0
        self._item = f"msg_{job.name.removeprefix('resp_')}"

    def _response(
        self, text: Text | None, counts: Counts | None, ticket: Mapping[str, Any] | None, status: str
    ) -> Json:
        cut = status == "incomplete"
        usage = None
        if counts is not None:
            usage = {
                "input_tokens": counts.prompt,
                "input_tokens_details": {
                    "cached_tokens": counts.cached,
                    "cache_write_tokens": 0,
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": counts.answer,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": counts.prompt + counts.answer,
            }
        return {
            "id": self.job.name,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": None,
            "model": self.job.model,
            "object": "response",
            "output": [] if text is None else [self._message(text.text, "completed")],
            "parallel_tool_calls": True,
            "temperature": 0.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self.job.sampling.cap,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            TICKET_KEY: ticket,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _message(self, text: str | None, status: str) -> Json:
        part: Json = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        return {
            "id": self._item,
            "content": [] if text is None else [part],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _event(self, kind: str, **value: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({**value, "sequence_number": number, "type": kind}, kind)

    @staticmethod
    def _status(text: Text) -> str:
        return "incomplete" if text.finish == "length" else "completed"

    def whole(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> Json:
        return self._response(texts[0], counts, ticket, self._status(texts[0]))

    def start(self, counts: Counts) -> list[bytes]:
        response = self._response(None, None, None, "in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def begin(self, index: int) -> list[bytes]:
        part: Json = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        where = {"content_index": 0, "item_id": self._item, "output_index": 0}
        return [
            self._event("response.output_item.added", item=self._message(None, "in_progress"), output_index=0),
            self._event("response.content_part.added", **where, part=part),
        ]

    def token(self, index: int, token: str, finish: str | None) -> bytes:
        where = {"content_index": 0, "item_id": self._item, "output_index": 0}
        return self._event("response.output_text.delta", **where, delta=token, logprobs=[])

    def end(self, texts: Sequence[Text], counts: Counts, ticket: Mapping[str, Any] | None) -> list[bytes]:
        text = texts[0]
        where = {"content_index": 0, "item_id": self._item, "output_index": 0}
        part: Json = {"annotations": [], "text": text.text, "type": "output_text", "logprobs": None}
        return [
            self._event("response.output_text.done", **where, logprobs=[], text=text.text),
            self._event("response.content_part.done", **where, part=part),
            self._event("response.output_item.done", item=self._message(text.text, "completed"), output_index=0),
            self._event("response.completed", response=self._response(text, counts, ticket, self._status(text))),
        ]


FORMATS: Mapping[str, type[Format]] = {
    COMPLETIONS: Completions,
    CHAT: Chat,
    RESPONSES: Responses,
    MESSAGES: Messages,
    GENERATE: Generate,
}
