"""Settings that every test shares: one thread per process, and property tests that give the same answer every time."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports torch. Tests start processes of their own, and two cores carry them all.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
