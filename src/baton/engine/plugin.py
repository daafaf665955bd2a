"""The two entry points that vLLM finds: ours to answer, and to answer with nothing when not ours.

vLLM calls :func:`platform` while it decides on the device, once a process, and
:func:`register` in the API server, the engine core and every worker. Both do
nothing unless `baton engine` started the process, so that an installed Baton
leaves plain vLLM as it is.
"""

from __future__ import annotations

import os

from baton.engine.settings import EngineSettings


def platform() -> str | None:
    """The dotted name of our platform class, or None to leave vLLM's choice alone."""
    if not EngineSettings.read(os.environ).active:
        return None
    from vllm.platforms import builtin_platform_plugins

    # Only the CPU platform needs help; on CUDA, ROCm and others vLLM's own class stays.
    if builtin_platform_plugins["cpu"]() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "baton.engine.platform.BatonCpuPlatform"


def register() -> None:
    """Put the workarounds that the installed versions still need in place."""
    settings = EngineSettings.read(os.environ)
    if not settings.active:
        return
    from baton.engine import workarounds

    workarounds.apply(settings)
