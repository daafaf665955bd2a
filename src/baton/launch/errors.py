"""What the launcher refuses."""

from __future__ import annotations


class LaunchError(ValueError):
    """Flags that don't go together; the message names both values and the remedy."""
