"""How the two legs are ordered: one file a transfer mode."""

from baton.proxy.modes.read import run_read

__all__ = ["run_read"]
