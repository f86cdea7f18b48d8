"""Shows where the time of a training step goes: profiles some steps of the real trainer and adds up the times by part.

The module takes a trainer and returns milliseconds per step of each part. An operation of the forward pass belongs to
the part of the model that called it. An operation of the backward pass computes the gradient of a forward operation,
and belongs to the same part; torch's profiler gives both operations the same sequence number. On a GPU, the times of
kernels are added up. On a CPU, the times of the operations on the main thread are added up. Decided: parts are found by
hooks on the modules of PinFM and by the names of operations (matrix products, attention), so the profile stays correct
when operations are replaced. All work of `model.loss` outside of tables, projections and backbone belongs to the loss.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tackboard.bench.pretrain.ours import TimedTrainer

PARTS = {
    "tables": "tables",
    "projections": "projections φ_in, φ_out, ψ",
    "products": "backbone, matrix products",
    "attention": "backbone, attention",
    "backbone": "backbone, rest",
    "loss": "loss",
    "optimiser": "optimisers, table updates and clipping",
    "loader": "waiting for data",
    "rest": "rest",
}
MODULES = {"item_tables": "tables", "phi_in": "projections", "phi_out": "projections", "psi": "projections"}
MARK = "tackboard part: "
BACKWARD = "autograd::engine::evaluate_function: "
PRODUCT = re.compile(r"\b(addmm|mm|bmm|baddbmm|linear|_mkl_linear)\b|gemm|cutlass|nvjet", re.IGNORECASE)
ATTENTION = re.compile(r"attention|flash|fmha", re.IGNORECASE)


def profiled(trainer: TimedTrainer) -> dict[str, Any]:
    """Trains under the profiler and returns `parts` (ms per step), `wall_ms`, `gpu_ms` and `synchronisations`.

    On a CPU, `gpu_ms` and `synchronisations` are None.
    """
    is_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_gpu else [])
    profiler = profile(activities=activities)
    trainer.on_begin, trainer.on_end = profiler.start, profiler.stop
    _mark_parts(trainer)
    # Torch warns at each synchronisation of the host with the GPU. The warnings are counted.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_gpu:
            trainer.on_begin = _all(profiler.start, lambda: torch.cuda.set_sync_debug_mode("warn"), caught.clear)
            trainer.on_end = _all(lambda: torch.cuda.set_sync_debug_mode("default"), profiler.stop)
        trainer.train(quiet=True)
    num_steps = len(trainer.ends_s) - 1
    times_us = add_up(profiler.events(), is_gpu=is_gpu)
    parts = {part: times_us.get(part, 0.0) / 1000 / num_steps for part in PARTS}
    wall_ms = trainer.figures["wall_ms"]
    parts["loader"] = 0.0 if is_gpu else trainer.figures["loader_ms"]
    gpu_ms = kernels_us(profiler.events()) / 1000 / num_steps if is_gpu else None
    parts["rest"] += max(0.0, (wall_ms if gpu_ms is None else gpu_ms) - sum(parts.values()))
    return {
        "parts": {part: round(value, 4) for part, value in parts.items()},
        "wall_ms": wall_ms,
        "gpu_ms": gpu_ms,
        "synchronisations": len([one for one in caught if "synchron" in str(one.message)]) / num_steps
        if is_gpu
        else None,
    }


def add_up(events: Iterable[Any], *, is_gpu: bool) -> dict[str, float]:
    """Adds up the microseconds of the profiler's events by part. On a CPU, only the main thread counts."""
    known = [event for event in events if not _is_of_gpu(event)]
    parts_of_forward: dict[int, str] = {}
    for event in sorted(known, key=lambda event: event.time_range.start):
        part = _part_of_range(event)
        # If several operations have the same number, the part of the last one counts: it made the autograd node.
        if part is not None and event.sequence_nr >= 0:
            parts_of_forward[event.sequence_nr] = part
    main = {event.thread for event in known if event.name.startswith(MARK)}
    totals: dict[str, float] = {}
    for event in known:
        if not is_gpu and event.thread not in main:
            continue
        time_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        if time_us:
            part = _refined(_part(event, parts_of_forward), event, is_gpu=is_gpu)
            totals[part] = totals.get(part, 0.0) + time_us
    return totals


def kernels_us(events: Iterable[Any]) -> float:
    """Returns the microseconds of all kernels of a GPU. Copies of the next batch run beside them and do not count."""
    kernels = [event for event in events if _is_of_gpu(event) and not event.name.startswith((MARK, "Memcpy HtoD"))]
    return float(sum(event.time_range.elapsed_us() for event in kernels if not event.is_user_annotation))


def _is_of_gpu(event: Any) -> bool:
    return "CUDA" in str(event.device_type)


def _part_of_range(event: Any) -> str | None:
    """Returns the innermost marked part around an operation of a forward pass; None in a backward pass."""
    found = None
    while event is not None:
        if event.name.startswith(BACKWARD):
            return None
        if found is None and event.name.startswith(MARK):
            found = event.name.removeprefix(MARK)
        event = event.cpu_parent
    return found


def _part(event: Any, parts_of_forward: Mapping[int, str]) -> str:
    while event is not None:
        if event.name.startswith(MARK):
            return str(event.name.removeprefix(MARK))
        if event.name.startswith(BACKWARD):
            if "AccumulateGrad" in event.name:
                return "tables"  # Takes hardly any time, because dense gradients are moved without a copy.
            return parts_of_forward.get(event.sequence_nr, "rest")
        event = event.cpu_parent
    return "rest"


def _refined(part: str, event: Any, *, is_gpu: bool) -> str:
    """Divides the backbone into matrix products, attention and the rest, by the names of operations and kernels."""
    if part != "backbone":
        return part
    names = [event.name, *([kernel.name for kernel in event.kernels] if is_gpu else [])]
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith((MARK, BACKWARD)):
        names.append(parent.name)
        parent = parent.cpu_parent
    if any(ATTENTION.search(name) for name in names):
        return "attention"
    return "products" if any(PRODUCT.search(name) for name in names) else "backbone"


def _mark_parts(trainer: TimedTrainer) -> None:
    """Puts a named range of the profiler around each part of a PinFM and around the optimisers."""
    model = trainer.model
    for name, part in (*MODULES.items(), ("decoder", "backbone")):
        if isinstance(module := getattr(model, name, None), nn.Module):
            _mark_module(module, part)
    model.loss = _marked(model.loss, "loss")
    for name in ("prepare", "clip", "step"):
        setattr(trainer.optimizers, name, _marked(getattr(trainer.optimizers, name), "optimiser"))


def _mark_module(module: nn.Module, part: str) -> None:
    open_ranges: list[record_function] = []

    def enter(*_inputs: Any) -> None:
        open_ranges.append(record_function(MARK + part))
        open_ranges[-1].__enter__()

    def leave(*_outputs: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _marked(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def inside(*arguments: Any, **named: Any) -> Any:
        with record_function(MARK + part):
            return function(*arguments, **named)

    return inside


def _all(*functions: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        for function in functions:
            function()

    return call
