"""How the two legs are ordered: one file a transfer mode, and one for requests that ask for several answers."""

from baton.proxy.modes.read import run_read
from baton.proxy.modes.several import run_several
from baton.proxy.modes.turns import turn_of

__all__ = ["run_read", "run_several", "turn_of"]
