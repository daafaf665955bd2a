"""A model's config.json, where it is on this disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE_KEYS = ("mamba_d_state", "ssm_state_size", "state_size", "hybrid_override_pattern", "layers_block_type")
"""What only configs of models with state-space layers have."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, of a multimodal model its text part; empty when there is none or it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    config = _listed(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    text = _listed(text)
    return config | text | {"text_config": text}


_LISTS = ("layer_types", "architectures", "block_configs")


def _listed(config: dict[str, Any]) -> dict[str, Any]:
    """*config* without what ought to be a list and is none: vLLM says what is wrong with it when it reads it."""
    bad = {name for name in _LISTS if not isinstance(config.get(name), list | None)}
    kinds = {name: [str(each) for each in config[name]] for name in _LISTS[:2] if isinstance(config.get(name), list)}
    return {name: value for name, value in (config | kinds).items() if name not in bad}


def has_state(config: Mapping[str, Any]) -> bool:
    """Layers that keep a state and not a cache (Mamba, linear attention): their pages decide on the block size."""
    kinds = config.get("layer_types") or ()
    named = any("attention" not in str(kind) or "linear" in str(kind) for kind in kinds)
    return named or any(config.get(key) is not None for key in STATE_KEYS)
