"""Whether the replicas of an engine can share their components' weights as its flags say, before anything is loaded.

Pure: a command and a model's config.json in, sentences out. What the sizes mean is in engine/components.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine import UNFIT, Engine, component_problems, component_sizes, own_config
from baton.launch.commands import flag_value, json_flag
from baton.launch.errors import LaunchError
from baton.launch.shapes import ranks_of


def components_problems(args: Sequence[str], config: Mapping[str, Any], device: str) -> list[str]:
    """Everything that keeps an engine from sharing its components' weights as it was asked to.

    Args:
        args: its command.
        config: its model's; an empty one is not checked.
        device: ``cpu`` or ``accelerator``.
    """
    try:
        sizes, problems = component_sizes(own_config(json_flag(args, "--additional-config")))
    except (LaunchError, ValueError) as error:
        return [str(error)]
    ranks = ranks_of(args)
    transfer = json.loads(flag_value(args, "--kv-transfer-config") or "{}")
    engine = Engine(
        tensor=ranks.tensor,
        data=ranks.data,
        kv_role=transfer.get("kv_role"),
        spread=ranks.spread,
        unfit=tuple(flag for flag in UNFIT if _given(args, flag)),
        on_cpu=device == "cpu",
        external=bool({*_EXTERNAL} & {word.partition("=")[0] for word in args}),
    )
    return [*problems, *component_problems(sizes, engine, config)]


def _given(args: Sequence[str], flag: str) -> bool:
    """Whether *flag* is there and does something: a size of 1 does nothing."""
    return any(flag_value(args, name) not in (None, "1") for name in (flag, _SHORT.get(flag, flag)))


_EXTERNAL = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
_SHORT = {
    "--compilation-config": "-cc",
    "--decode-context-parallel-size": "-dcp",
    "--pipeline-parallel-size": "-pp",
    "--prefill-context-parallel-size": "-pcp",
    "--quantization": "-q",
    "--speculative-config": "-sc",
}
