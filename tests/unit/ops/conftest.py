"""Lets the tests of this folder import the modules that lie beside them: `triton_runs` and the cases of kernels."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
