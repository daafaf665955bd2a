"""The engine's room: what runs inside a vLLM process that Baton starts.

The only folder that imports vllm, and it does so inside functions: importing
``baton.engine`` costs nothing and works where no engine is installed.
"""

from baton.engine.bounds import PushBounds
from baton.engine.components import COMPONENTS_UNFIT, ComponentSizes, EngineFacts, component_problems, component_sizes
from baton.engine.own_config import own_config
from baton.engine.settings import CPUS, ENGINE_SWITCH, NIXL_NAP_US, EngineSettings, format_cpus, parse_cpus

__all__ = [
    "COMPONENTS_UNFIT",
    "CPUS",
    "ENGINE_SWITCH",
    "NIXL_NAP_US",
    "ComponentSizes",
    "EngineFacts",
    "EngineSettings",
    "PushBounds",
    "component_problems",
    "component_sizes",
    "format_cpus",
    "own_config",
    "parse_cpus",
]
