"""The engine's room: what runs inside a vLLM process that Baton starts.

The only folder that imports vllm, and it does so inside functions: importing
``baton.engine`` costs nothing and works where no engine is installed.
"""

from baton.engine.bounds import PushBounds
from baton.engine.settings import CPUS, ENGINE_SWITCH, NIXL_NAP_US, EngineSettings, format_cpus, parse_cpus

__all__ = ["CPUS", "ENGINE_SWITCH", "NIXL_NAP_US", "EngineSettings", "PushBounds", "format_cpus", "parse_cpus"]
