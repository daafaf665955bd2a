"""The lab: fake engines that hold leases, expire, restart and break as real ones do, and a ledger of all of it."""

from baton.sim.faults import BadFault, Fault, Kind, Phase
from baton.sim.lab import Lab, specs
from baton.sim.ledger import Lease, LeaseState, Ledger
from baton.sim.settings import EngineSettings, EngineSpec

__all__ = [
    "BadFault",
    "EngineSettings",
    "EngineSpec",
    "Fault",
    "Kind",
    "Lab",
    "Lease",
    "LeaseState",
    "Ledger",
    "Phase",
    "specs",
]
