"""This package holds the kernels: one module per family of operators, except that `history` holds two families."""

from __future__ import annotations

import importlib

MODULES = ("arithmetic", "comparison", "missing", "ids", "scaling", "vectors", "text", "clock", "lists", "history")


def load() -> None:
    """Registers every operator."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
