"""`baton sim`, from its words to its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from baton.cli.main import main
from tests.ports import free_ports

SIM = (sys.executable, "-m", "baton.cli", "sim")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lab_with_a_proxy_answers_and_ends_when_it_is_told(number: signal.Signals) -> None:
    (front,) = free_ports(1)
    words = ["--port", "0", "--proxy", "--proxy-port", str(front), "--json", "--decode-step-ms", "1", "--mode", "write"]
    with subprocess.Popen([*SIM, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert [engine["name"] for engine in said["engines"]] == ["P0", "D0"]
            assert said["proxy"] == f"http://127.0.0.1:{front}"
            body = json.dumps({"model": "sim", "prompt": "hello", "max_tokens": 3}).encode()
            request = urllib.request.Request(
                f"{said['proxy']}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 3
            with urllib.request.urlopen(f"{said['engines'][0]['url']}/sim/ledger", timeout=30) as response:
                assert json.load(response)["counts"] == {"given": 1, "pulled": 1}
        finally:
            process.send_signal(number)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fault", "explode"], "'explode' is not a kind of fault"),
        (["--port", "0", "--fault", "reset,engine=P7"], "there is no engine 'P7'"),
        (["--prefill", "0"], "'0' is not a whole number of 1 or more"),
        (["--prefill", "500"], "--port"),
        (["--port", "65530", "--decode", "10"], "65535"),
        (["--prefill-tokens-per-second", "0"], "'0' is not a number above 0"),
        (["--decode-step-ms", "-1"], "'-1' is not a number of 0 or more"),
        (["--mod", "read"], "did you mean --mode"),
    ],
)
def test_words_that_are_off_are_told_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_a_comparison_with_nobody_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    assert main(["sim", "--check-against", url, url]) == 1
    assert f"{url} does not answer as an engine" in capsys.readouterr().err
