"""These tests run on both event loops."""

from tests.loops import loop_kind

__all__ = ["loop_kind"]
