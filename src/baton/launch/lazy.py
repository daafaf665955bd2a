"""Modules that are imported when something of them is first used: aiohttp alone is a third of a command's start."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class _Lazy:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def lazily(name: str) -> Any:
    """The module *name*, which is imported at the first look into it."""
    return sys.modules.get(name) or _Lazy(name)
