"""Hypothesis on a shared, slow machine: no deadline, and the same examples each time."""

from hypothesis import settings

settings.register_profile("plan", deadline=None, derandomize=True)
settings.load_profile("plan")
