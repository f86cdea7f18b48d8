"""Decides how the steps of a run are executed: on which device, and whether compiled, padded or replayed."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from tackboard.core.errors import UsageError
from tackboard.core.machine import has_nvidia_driver
from tackboard.core.progress import say


def choose_device(name: str, setting: str = "training.device", fix: str = "--set training.device=") -> torch.device:
    """Returns the device of this name; `auto` means a GPU if torch sees one.

    Raises UsageError if the name is that of a GPU that torch does not see. `setting` and `fix` tell where the name came
    from and how to give another name.
    """
    if name == "auto":
        is_there = torch.cuda.is_available()
        if not is_there and has_nvidia_driver():
            say("warning: an NVIDIA driver is loaded, but torch sees no GPU, so the CPU is used: run tackboard doctor")
        return torch.device("cuda" if is_there else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{setting} = {name}, but torch sees no GPU", fix=f"{fix}cpu")
    if device.type == "cuda" and (device.index or 0) >= (num_gpus := torch.cuda.device_count()):
        raise UsageError(
            f"{setting} = {name}, but torch sees {num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'}",
            allowed="allowed: " + ", ".join(f"cuda:{number}" for number in range(num_gpus)),
            fix=f"{fix}cuda",
        )
    return device


def shall_compile(wanted: str, device: torch.device) -> bool:
    """Returns whether to compile on this device. Raises UsageError if `training.compile` is on without a compiler."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False
    names = (os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc"))
    missing = [name for name in names if shutil.which(name) is None]
    if missing and wanted == "on":
        raise UsageError(
            f"training.compile is on, but there is no {' and no '.join(missing)}",
            allowed="torch compiles with a C++ compiler",
            fix="install one (apt-get install g++), or --set training.compile=off",
        )
    if missing:
        say(f"warning: training.compile = auto does not compile: there is no {' and no '.join(missing)}")
    return not missing


def shall_pad(wanted: str, model: Any, device: torch.device, *, is_compiled: bool) -> bool:
    """Returns whether to pad batches. Raises UsageError if `training.pad_shapes` is on for a model that cannot pad."""
    can_pad = bool(getattr(model, "can_pad", False))
    if wanted == "on" and not can_pad:
        raise UsageError(
            f"training.pad_shapes is on, but {type(model).__name__} cannot pad its batches",
            allowed="a model that can pad, such as PinFM, has can_pad = True (models/interface.py)",
            fix="--set training.pad_shapes=auto",
        )
    return wanted == "on" or (wanted == "auto" and can_pad and is_compiled and device.type == "cuda")


def shall_replay(wanted: str, model: Any, device: torch.device, *, pads: bool) -> bool:
    """Says whether to replay steps as CUDA graphs. Raises UsageError if `wanted` is `on` and replay is impossible."""
    can_replay = pads and device.type == "cuda" and bool(getattr(model, "can_replay", False))
    if wanted == "on" and not can_replay:
        raise UsageError(
            f"training.cuda_graphs is on, but this {type(model).__name__} on {device.type} cannot replay its steps",
            allowed="allowed: a model with can_replay = True, such as PinFM, on a GPU with padded batches",
            fix="--set training.cuda_graphs=auto",
        )
    return wanted != "off" and can_replay
