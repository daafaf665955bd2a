"""Component data parallelism: weights of a component sharded over several data parallel replicas of a decode server.

Each replica keeps its requests, its scheduler and its KV cache; around a component the rows of several replicas are
gathered, so that each rank reads a part of the weights for all of them. Importing this package costs nothing: what
needs torch and vllm is in its other files.
"""

from baton.engine.components.config import (
    COMPONENTS_UNFIT,
    ComponentSizes,
    EngineFacts,
    component_problems,
    component_sizes,
)

__all__ = ["COMPONENTS_UNFIT", "ComponentSizes", "EngineFacts", "component_problems", "component_sizes"]
