"""The engine's room: what runs inside a vLLM process that Baton starts.

The only folder that imports vllm, and it does so inside functions: importing
``baton.engine`` costs nothing and works where no engine is installed.
"""

from baton.engine.bounds import PushBounds
from baton.engine.components import COMPONENTS_UNFIT, ComponentSizes, EngineFacts, component_problems, component_sizes
from baton.engine.own_config import own_config
from baton.engine.settings import (
    CPUS,
    ENGINE_SWITCH,
    NIXL_NAP_US,
    STATIC_SHAPES,
    EngineSettings,
    format_cpus,
    parse_cpus,
)
from baton.engine.static.buckets import asked_for as static_shapes_asked_for
from baton.engine.static.buckets import problems as static_shapes_problems

__all__ = [
    "COMPONENTS_UNFIT",
    "CPUS",
    "ENGINE_SWITCH",
    "NIXL_NAP_US",
    "STATIC_SHAPES",
    "ComponentSizes",
    "EngineFacts",
    "EngineSettings",
    "PushBounds",
    "component_problems",
    "component_sizes",
    "format_cpus",
    "own_config",
    "parse_cpus",
    "static_shapes_asked_for",
    "static_shapes_problems",
]
