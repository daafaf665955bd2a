"""The lab: fake engines that hold leases, expire, restart and break as real ones do, and a ledger of all of it."""

from collections.abc import Sequence

from baton.sim.check import Difference, Unreachable, compare
from baton.sim.check_cases import Case, cases
from baton.sim.faults import BadFault, Fault, Kind, Phase
from baton.sim.lab import Lab, specs
from baton.sim.ledger import Lease, LeaseState, Ledger
from baton.sim.settings import EngineSettings, EngineSpec


def campaign(argv: Sequence[str]) -> int:
    """Run ``python -m baton.sim.chaos``; the exit code."""
    # Only here: a program that is run with -m must not have been imported before.
    from baton.sim.chaos import main

    return main(argv)


__all__ = [
    "BadFault",
    "Case",
    "Difference",
    "EngineSettings",
    "EngineSpec",
    "Fault",
    "Kind",
    "Lab",
    "Lease",
    "LeaseState",
    "Ledger",
    "Phase",
    "Unreachable",
    "campaign",
    "cases",
    "compare",
    "specs",
]
