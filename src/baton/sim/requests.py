"""What a client asks of an engine, checked as strictly as vLLM does (0.32). Pure: from a body to a :class:`Job`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.sim.settings import EngineSettings
from baton.sim.text import Sampling, count_of, tokens_of, tokens_of_ids
from baton.sim.tickets import problem

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"
PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)
TICKET_KEY = "kv_transfer_params"
# How vLLM names a request of each endpoint; it adds a random end of its own in the engine.
_NAMES = {
    COMPLETIONS: "cmpl-{}",
    CHAT: "chatcmpl-{}",
    MESSAGES: "chatcmpl-{}",
    GENERATE: "generate-tokens-{}",
}
_DEFAULT_COMPLETION_TOKENS = 16
# What the choice of tokens depends on besides the prompt.
_KEY_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_EMPTY: Mapping[str, Any] = {}


class Refused(Exception):
    """A request that an engine answers with an error.

    Attributes:
        status: of HTTP.
        kind: vLLM's word for it (``type``).
        param: the field at fault.
        early: whether that is said before the endpoint has seen the request.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
        *,
        early: bool = False,
    ) -> None:
        super().__init__(message)
        self.early = early
        self.status = status
        self.kind = kind
        self.param = param

    def body(self, path: str) -> dict[str, Any]:
        """In the shape of the endpoint at *path*."""
        if path == MESSAGES:
            return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


@dataclass(slots=True)
class Job:
    """One request, understood.

    Attributes:
        path: its endpoint.
        name: its id, as the answer says it.
        model: as the answer says it.
        prompts: tokens of each.
        samples: answers to each prompt.
        sampling: of all of them.
        stream: whether the answer comes as events.
        usage: whether a stream ends with one on tokens.
        ticket: ``kv_transfer_params``, checked.
        echo: whether the prompt is part of the answer.
        texts: of the prompts, for the echo.
    """

    path: str
    name: str
    model: str
    prompts: list[bytes]
    samples: int
    sampling: Sampling
    stream: bool
    usage: bool
    ticket: Mapping[str, Any] | None
    echo: bool = False
    texts: list[str] = field(default_factory=list)

    def engine_name(self, prompt: int, sample: int) -> str:
        """The id in the engine of one sequence, with the random end that makes it unique there."""
        base = _engine_base(self.path, self.name, prompt)
        if self.samples > 1:
            base = f"{sample}_{base}"
        return f"{base}-{secrets.token_hex(4)}"


def read(path: str, body: Any, request_id: str | None, settings: EngineSettings) -> Job:
    """Understand a body.

    Args:
        request_id: the header ``X-Request-Id``.

    Raises:
        Refused: as vLLM refuses it.
    """
    if not isinstance(body, dict):
        raise Refused("Input should be a valid dictionary or object to extract fields from", "body", kind="Bad Request")
    model = body.get("model")
    if model is not None and model != settings.model:
        raise Refused(
            f"The model `{model}` does not exist. Valid aliases: {settings.model}.", "model", 404, "NotFoundError"
        )
    stream = bool(body.get("stream"))
    if body.get("stream_options") and not stream:
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise Refused(message, "stream_options", early=True)
    ticket = _ticket(body, settings)
    texts: list[str] = []
    prompts = _READERS[path](body, texts)
    fields = _fields(body) if path == GENERATE else body
    sampling = _sampling(path, fields, max(map(count_of, prompts)), settings)
    samples = _whole(fields, "n") or 1
    return Job(
        path,
        _name(path, body, request_id),
        settings.model,
        prompts,
        samples,
        sampling,
        stream,
        bool((body.get("stream_options") or _EMPTY).get("include_usage")),
        ticket,
        bool(fields.get("echo")) and path == COMPLETIONS,
        texts,
    )


def base_name(path: str, body: Mapping[str, Any], request_id: str | None) -> str:
    """The id in the engine of a request for one answer, without its random end."""
    return _engine_base(path, _name(path, body, request_id), 0)


def _engine_base(path: str, name: str, prompt: int) -> str:
    if path == COMPLETIONS:
        return f"{name}-{prompt}"
    return f"{name}_0" if path == RESPONSES else name


def _name(path: str, body: Mapping[str, Any], request_id: str | None) -> str:
    if path == RESPONSES:
        return str(body.get("request_id") or f"resp_{secrets.token_hex(8)}")
    return _NAMES[path].format(request_id or body.get("request_id") or secrets.token_hex(8))


def _ticket(body: Mapping[str, Any], settings: EngineSettings) -> Mapping[str, Any] | None:
    ticket = body.get(TICKET_KEY)
    if ticket is None or not settings.connector:
        return None
    wrong = problem(ticket, push=settings.mode == "write")
    if wrong is not None:
        raise Refused(wrong, TICKET_KEY, early=True)
    assert isinstance(ticket, Mapping)
    return ticket


def _fields(body: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = body.get("sampling_params")
    if not isinstance(fields, dict):
        raise Refused("sampling_params: Field required", "sampling_params", kind="Bad Request")
    return fields


def _sampling(path: str, fields: Mapping[str, Any], longest: int, settings: EngineSettings) -> Sampling:
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    if path == CHAT and fields.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    asked = _whole(fields, name)
    room = settings.longest - longest
    if room < 1:
        most = settings.longest
        raise Refused(
            f"This model's maximum context length is {most} tokens. However, your prompt contains at least {most + 1} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={most + 1})",
            "input_tokens",
        )
    if asked is not None and asked < 1 and not (asked == 0 and fields.get("echo")):
        raise Refused(f"{name} must be at least 1, got {asked}. (parameter={name}, value={asked})", name)
    if asked is not None and asked > settings.longest:
        raise Refused(
            f"{name}={asked} cannot be greater than max_model_len={settings.longest}. Please request fewer output "
            f"tokens. (parameter={name}, value={asked})",
            name,
        )
    if asked is not None and asked > room:
        raise Refused(
            f"This model's maximum context length is {settings.longest} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {longest} input tokens, for a total of {asked + longest} tokens. Please "
            "reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={longest})",
            "input_tokens",
        )
    if asked is None:
        asked = min(room, _DEFAULT_COMPLETION_TOKENS) if path == COMPLETIONS else room
    least = _whole(fields, "min_tokens") or 0
    if least > asked:
        raise Refused(f"min_tokens must be less than or equal to max_tokens={asked}, got {least}.")
    if (samples := _whole(fields, "n")) is not None and samples < 1:
        raise Refused(f"n must be at least 1, got {samples}.")
    temperature = fields.get("temperature")
    if samples is not None and samples > 1 and temperature == 0:
        raise Refused(f"n must be 1 when using greedy sampling, got {samples}.")
    if isinstance(temperature, int | float) and temperature < 0:
        value = float(temperature)
        message = f"temperature must be non-negative, got {value}. (parameter=temperature, value={value})"
        raise Refused(message, "temperature")
    stop = fields.get("stop_sequences" if path == MESSAGES else "stop") or ()
    return Sampling(
        asked,
        least,
        bool(fields.get("ignore_eos")),
        (stop,) if isinstance(stop, str) else tuple(stop),
        sampling_key(fields),
    )


def sampling_key(fields: Mapping[str, Any]) -> str:
    """What else the choice of tokens depends on; without a temperature nothing."""
    if not fields.get("temperature"):
        return ""
    return repr([fields.get(name) for name in _KEY_FIELDS])


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{name}: Input should be a valid integer", name, kind="Bad Request")
    return value


def _completion_prompts(body: Mapping[str, Any], texts: list[str]) -> list[bytes]:
    prompt = body.get("prompt")
    if not prompt:
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    made = []
    for each in prompt if several else [prompt]:
        made.append(tokens_of(each) if isinstance(each, str) else _ids(each, "prompt"))
        texts.append(each if isinstance(each, str) else "")
    return made


def _chat_prompt(body: Mapping[str, Any], texts: list[str]) -> list[bytes]:
    return [_conversation(body.get("messages"), "messages", body.get("system"))]


def _response_prompt(body: Mapping[str, Any], texts: list[str]) -> list[bytes]:
    given = body.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_conversation(messages, "input", body.get("instructions"))]


def _generate_prompt(body: Mapping[str, Any], texts: list[str]) -> list[bytes]:
    return [_ids(body.get("token_ids"), "token_ids")]


def _ids(ids: Any, name: str) -> bytes:
    try:
        if not isinstance(ids, Sequence) or not ids:
            raise TypeError
        return tokens_of_ids(ids)
    except (TypeError, OverflowError):
        raise Refused(f"{name}: Input should be a valid list of token ids", name, kind="Bad Request") from None


def _conversation(messages: Any, name: str, system: Any) -> bytes:
    """The prompt of a conversation: each turn on lines of its own, the assistant's next one begun."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{name}: Field required", name, kind="Bad Request")
    turns = [f"<system>\n{_content(system)}\n"] if system else []
    for message in messages:
        if not isinstance(message, dict):
            raise Refused(f"{name}: Input should be a valid dictionary", name, kind="Bad Request")
        turns.append(f"<{message.get('role')}>\n{_content(message.get('content'))}\n")
    return tokens_of("".join(turns) + "<assistant>\n")


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


_READERS: Mapping[str, Callable[[Mapping[str, Any], list[str]], list[bytes]]] = {
    COMPLETIONS: _completion_prompts,
    CHAT: _chat_prompt,
    RESPONSES: _response_prompt,
    MESSAGES: _chat_prompt,
    GENERATE: _generate_prompt,
}
