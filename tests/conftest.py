"""For all tests: a slow machine is no fault of what hypothesis tries."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# In Python from here on: tests patch it. What is compiled runs in processes of its own.
import baton.proxy  # noqa: F401

settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
