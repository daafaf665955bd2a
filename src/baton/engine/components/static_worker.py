"""A worker that shares its components' weights, and whose steps have a few sizes only: those of static shapes."""

from __future__ import annotations

from baton.engine.components.worker import ComponentMixin
from baton.engine.static.worker import StaticWorker


class StaticComponentCpuWorker(ComponentMixin, StaticWorker):
    """Steps are padded and run uncompiled: how many rows the others have is no shape of a graph."""
