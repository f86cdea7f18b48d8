"""Tests of several processes skip, with a reason, without TorchRec and in `make test`, which has two workers."""

from __future__ import annotations

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if importlib.util.find_spec("torchrec") is None:
        reason = "torchrec is not installed: make distributed"
    elif os.environ.get("TACKBOARD_LEAVE_OUT") == "dist":
        reason = "make test-dist runs it"
    for item in items:
        is_ours = item.get_closest_marker("dist") and not item.get_closest_marker("slow")
        if reason and is_ours:
            item.add_marker(pytest.mark.skip(reason=reason))
