"""A model's config.json, where it is on this disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, of a multimodal model its text part; empty when there is none or it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config
