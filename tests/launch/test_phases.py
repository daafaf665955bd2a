from __future__ import annotations

import pytest

from baton.launch.phases import phase_of, reason_of


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        (
            "(APIServer pid=1) INFO 11-29 19:29:38 [model.py:733] Resolved architecture: LlamaForCausalLM",
            "reading the model's config",
        ),
        ("(Worker pid=2) INFO 11-29 19:29:40 [cpu_model_runner.py:68] Starting to load model m...", "loading weights"),
        ("INFO:     Application startup complete.", "answering"),
        ("something else", None),
    ],
)
def test_a_phase_is_read_off_its_line(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


def test_the_reason_is_the_inner_error_and_not_the_pointer_to_it() -> None:
    lines = [
        "(Worker pid=2) ERROR 11-29 19:29:43 [core.py:1] Traceback (most recent call last):",
        "(Worker pid=2) ERROR 11-29 19:29:43 [core.py:1] ValueError: no room for the KV cache",
        "(EngineCore pid=2) ERROR 11-29 19:29:43 [core.py:1] Exception: WorkerProc initialization failed due to an exc",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert reason_of(lines) == "ValueError: no room for the KV cache"
    assert reason_of(["baton engine: error: unrecognized arguments: --nope"]) == "error: unrecognized arguments: --nope"
    assert reason_of(["all is well"]) is None


def test_an_error_that_a_warning_quotes_is_no_reason() -> None:
    quoted = (
        "(APIServer pid=1) WARNING 11-29 21:45:14 [a.py:1] may fail with `OSError: [Errno 24] Too many open files`."
    )
    assert reason_of([quoted]) is None
    assert reason_of([quoted, "ValueError: the real one", "(W pid=1) INFO 11-29 21:45:15 [a.py:1] Error: none"]) == (
        "ValueError: the real one"
    )
