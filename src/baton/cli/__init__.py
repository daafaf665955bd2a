"""The commands: one file each, parsing and printing only."""

from baton.cli.main import main

__all__ = ["main"]
