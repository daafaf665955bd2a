"""Whether the replicas of an engine can share their components' weights as its flags say, before anything is loaded.

Pure: a command and a model's config.json in, sentences out. What the sizes mean is in engine/components.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.engine import COMPONENTS_UNFIT, ComponentSizes, EngineFacts, component_problems, component_sizes, own_config
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
        sizes, problems = _asked(args)
    except (LaunchError, ValueError) as error:
        return [str(error)]
    ranks = ranks_of(args)
    transfer = json.loads(flag_value(args, "--kv-transfer-config") or "{}")
    engine = EngineFacts(
        tensor=ranks.tensor,
        data=ranks.data,
        kv_role=transfer.get("kv_role"),
        spread=ranks.spread,
        unfit=tuple(flag for flag in COMPONENTS_UNFIT if _given(args, flag)),
        on_cpu=device == "cpu",
        external=bool({*_EXTERNAL} & {word.partition("=")[0] for word in args}),
    )
    return [*problems, *component_problems(sizes, engine, config)]


def saved_share(args: Sequence[str], tensors: Mapping[str, int]) -> float:
    """The part of a model's weights that each replica of an engine leaves to the others: 0 to 1.

    Args:
        args: its command.
        tensors: bytes of each tensor, by its name in a checkpoint.
    """
    try:
        sizes, _ = _asked(args)
    except (LaunchError, ValueError):
        return 0.0
    held = dict(sizes.items())
    left = sum(size * (1 - 1 / held[component]) for name, size in tensors.items() for component in _of(name))
    return left / (sum(tensors.values()) or 1)


def _of(tensor: str) -> Iterator[str]:
    """The component that a tensor belongs to, if any."""
    for component, part in _PARTS.items():
        if part in f".{tensor}" and ".experts." not in tensor and tensor.rsplit(".", 2)[-2].endswith(_ENDINGS):
            yield component


_PARTS = {"attention": ".self_attn.", "embedding": ".embed_tokens.", "mlp": ".mlp.", "lm_head": ".lm_head."}
_ENDINGS = ("_proj", "embed_tokens", "lm_head")


def _asked(args: Sequence[str]) -> tuple[ComponentSizes, list[str]]:
    return component_sizes(own_config(json_flag(args, "--additional-config")))


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
