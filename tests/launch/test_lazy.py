from __future__ import annotations

import subprocess
import sys

import pytest

from baton.launch.lazy import lazily


def test_a_module_is_itself() -> None:
    import json

    assert lazily("json").loads is json.loads


def test_what_is_not_there_is_said_when_it_is_wanted() -> None:
    module = lazily("no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        _ = module.anything


@pytest.mark.parametrize("command", ["plan", "down", "status", "doctor"])
def test_a_command_starts_without_what_it_may_not_need(command: str) -> None:
    heavy = "'aiohttp', 'vllm', 'torch'"
    code = f"import sys, baton.cli.{command}; print([name for name in ({heavy}) if name in sys.modules])"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
