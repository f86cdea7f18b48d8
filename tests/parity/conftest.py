"""Lets the tests of this folder import the modules that lie beside them: a reference and makers of test data."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
