"""How the two legs are ordered: one file a transfer mode, and one for requests that ask for several answers."""

from baton.proxy.modes.several import run_several
from baton.proxy.modes.single import run_prefill_alone, run_single
from baton.proxy.modes.turns import turn_of

__all__ = ["run_prefill_alone", "run_several", "run_single", "turn_of"]
