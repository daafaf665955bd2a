"""What an engine is doing, read off its log: a pure function from a line to a phase.

The words are vLLM's (0.32). A phase that isn't recognised is only a display that stays
where it was; readiness is asked of the engine itself.
"""

from __future__ import annotations

import re

STARTING = "importing vLLM"

_PHASES = (
    ("Resolved architecture", "reading the model's config"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "setting the model up"),
    ("Dynamo bytecode transform", "compiling"),
    ("Compiling a graph", "compiling"),
    ("KV cache size", "making the KV cache"),
    ("Initializing NIXL wrapper", "starting NIXL"),
    ("Registering KV_Caches", "registering the KV cache"),
    ("init engine (profile", "starting the API"),
    ("Application startup complete", "answering"),
)

_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Interrupt|Gone)|error): (.+)")
_PREFIX = re.compile(r"^(\(\w+[^)]*\)\s*)?((INFO|WARNING|ERROR)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\]\s*)?")
_CALM = re.compile(r"\b(DEBUG|INFO|WARNING)\s+\d\d-\d\d \d\d:")
_VAGUE = ("Engine core initialization failed", "WorkerProc initialization failed", "See root cause above")


def phase_of(line: str) -> str | None:
    """The phase that a log *line* announces, or None."""
    return next((phase for word, phase in _PHASES if word in line), None)


def reason_of(lines: list[str]) -> str | None:
    """The line that says why a process died, without log prefixes; None when none does.

    vLLM's outer errors only point at an inner one, which was logged before: that one is taken.
    """
    # A warning may quote an error that vLLM only fears.
    grave = [strip_prefix(line) for line in lines if not _CALM.search(line)]
    reasons = [match.group(0).strip() for line in grave if (match := _ERROR.search(line))]
    telling = [reason for reason in reasons if not any(word in reason for word in _VAGUE)]
    return (telling or reasons or [None])[-1]  # type: ignore[list-item]


def strip_prefix(line: str) -> str:
    """A log line without process, level, time and place."""
    return _PREFIX.sub("", line).strip()
