"""For all tests: a slow machine is no fault of what hypothesis tries."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
