"""What the campaign calls right, an error, and wrong."""

from __future__ import annotations

import pytest

from baton.sim.judge import Heard, judge
from baton.sim.text import Text

RIGHT = Text((" a", " b"), "length")
WHOLE = b'{"choices": [{"text": " a b"}]}'
FIRST = b'data: {"choices": [{"text": " a"}]}\n\n'
SECOND = b'data: {"choices": [{"text": " b"}]}\n\n'
DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error": {"message": "no"}}\n\n'


def word(status: int, body: bytes, *, whole: bool = True, stream: bool = False, refusals: bool = False) -> str:
    return judge("/v1/completions", stream, RIGHT, Heard(status, body, whole), refusals=refusals).word


def test_the_right_text_is_right() -> None:
    assert word(200, WHOLE) == "right"
    assert word(200, FIRST + SECOND + DONE, stream=True) == "right"


@pytest.mark.parametrize("body", [b'{"error": {"message": "no"}}'])
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_error_that_says_so_is_one(status: int, body: bytes) -> None:
    assert word(status, body) == "error"


def test_a_cut_is_an_error_that_a_client_sees() -> None:
    assert word(0, b"", whole=False) == "error"
    assert word(200, WHOLE[:9], whole=False) == "error"
    assert word(200, FIRST, whole=False, stream=True) == "error"
    assert word(200, FIRST + FAILED, stream=True) == "error"


@pytest.mark.parametrize(
    ("status", "body", "stream", "says"),
    [
        (200, b'{"choices": [{"text": " a c"}]}', False, "wrong text"),
        (200, b'{"choices": [{"text": ""}]}', False, "empty 200"),
        (200, b"", False, "not JSON"),
        (200, b'{"error": {}, "choices": [{"text": ""}]}', False, "empty 200"),
        (200, b'{"error": {"message": "no"}}', False, "200 with an error"),
        (400, b'{"error": {"message": "no"}}', False, "400 for a good request"),
        (502, b"{}", False, "without an error"),
        (502, b"oh", False, "not JSON"),
        (200, FIRST + FIRST + DONE, True, "wrong text"),
        (200, SECOND, True, "wrong text before an error"),
        (200, DONE, True, "empty 200"),
        (200, FIRST + SECOND, True, "looks whole"),
        (200, FIRST, True, "looks whole"),
        (200, b"", True, "looks whole"),
    ],
)
def test_everything_else_is_wrong(status: int, body: bytes, stream: bool, says: str) -> None:
    assert says in word(status, body, stream=stream)


def test_a_refusal_is_an_error_only_where_one_was_asked_for() -> None:
    assert word(400, b'{"error": {"message": "no"}}', refusals=True) == "error"
