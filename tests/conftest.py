"""For all tests: a slow machine is no fault of what hypothesis tries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from baton import compiled

if os.environ.get("BATON_TESTS_COMPILED") == "1":
    compiled.use()
    assert compiled.form() == "compiled", compiled.form()
# In this form from here on, in Python unless asked: tests patch it. Processes of their own run what is compiled.
import baton.proxy  # noqa: F401

settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
