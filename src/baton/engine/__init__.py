"""The engine's room: what runs inside a vLLM process that Baton starts.

The only folder that imports vllm, and it does so inside functions: importing
``baton.engine`` costs nothing and works where no engine is installed.
"""

from baton.engine.settings import ENGINE_SWITCH, EngineSettings

__all__ = ["ENGINE_SWITCH", "EngineSettings"]
