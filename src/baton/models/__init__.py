"""Where a model comes from: the embedded one, a local folder or a hub id.

Nothing here imports torch or transformers; unpacking runs in a child process.
"""

from baton.models.embedded import (
    EMBEDDED,
    EmbeddedModel,
    ModelError,
    cache_root,
    ensure,
    installed_path,
)
from baton.models.resolve import ResolvedModel, resolve

__all__ = [
    "EMBEDDED",
    "EmbeddedModel",
    "ModelError",
    "ResolvedModel",
    "cache_root",
    "ensure",
    "installed_path",
    "resolve",
]
