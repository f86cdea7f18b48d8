"""Where the time goes, by part."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tackboard.bench.pretrain.breakdown import BACKWARD, MARK, PARTS, add_up, kernels_us
from tackboard.bench.pretrain.contender import Spec, measure


def event(name: str, start: int, parent: Any = None, number: int = -1, us: float = 1.0, thread: int = 1) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start),
        cpu_parent=parent,
        sequence_nr=number,
        thread=thread,
        self_cpu_time_total=us,
        self_device_time_total=us,
        device_type=None,
        kernels=[],
    )


def test_an_operation_of_the_backward_pass_belongs_to_its_forward_operation() -> None:
    loss = event(f"{MARK}loss", 0, us=0.0)
    backbone = event(f"{MARK}backbone", 1, loss, us=0.0)
    forward = event("aten::addmm", 2, backbone, number=7, us=2.0)
    norm = event("aten::native_layer_norm", 3, backbone, number=8, us=1.0)
    sums = event("aten::logsumexp", 4, loss, number=9, us=5.0)
    node = event(f"{BACKWARD}AddmmBackward0", 5, number=7, us=0.5)
    product = event("aten::mm", 6, node, us=4.0)
    attention = event("aten::_scaled_dot_product_flash_attention_backward", 7, event(f"{BACKWARD}X", 7, number=8), us=3)
    update = event("aten::coalesce", 8, event(f"{BACKWARD}torch::autograd::AccumulateGrad", 8), us=6.0)
    other = event("aten::mm", 9, us=7.0, thread=2)
    found = add_up([loss, backbone, forward, norm, sums, node, product, attention, update, other], is_gpu=False)
    assert found == {"products": 6.0, "backbone": 1.5, "loss": 5.0, "attention": 3.0, "tables": 6.0}


@pytest.mark.filterwarnings("ignore:.*")
def test_the_parts_of_real_steps_add_up_to_the_step(tiny_spec: Spec) -> None:
    found = measure(dataclasses.replace(tiny_spec, is_profiled=True))
    assert list(found["parts"]) == list(PARTS)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_ms"], rel=0.2)
    for part in ("tables", "projections", "products", "attention", "loss", "optimiser"):
        assert found["parts"][part] > 0
    assert found["gpu_ms"] is None


def test_the_time_of_a_gpu_is_that_of_its_kernels() -> None:
    def kernel(name: str, us: float, *, is_user_annotation: bool = False) -> Any:
        made = event(name, 0)
        made.device_type, made.is_user_annotation = "DeviceType.CUDA", is_user_annotation
        made.time_range = SimpleNamespace(start=0, elapsed_us=lambda: us)
        return made

    ranges = [kernel(f"{MARK}loss", 100.0), kernel("own range", 100.0, is_user_annotation=True)]
    events = [kernel("gemm", 3.0), kernel("Memcpy HtoD (Pinned -> Device)", 50.0), event("aten::mm", 0), *ranges]
    assert kernels_us(events) == 3.0
    product = event("aten::mm", 1, event(f"{MARK}backbone", 0, us=0.0), us=0.0)
    product.self_device_time_total, product.kernels = 3.0, [SimpleNamespace(name="gemm")]
    assert add_up([product, *events], is_gpu=True)["products"] == 3.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*")
def test_a_gpu_has_kernels_and_counted_synchronisations(tiny_spec: Spec) -> None:
    spec = dataclasses.replace(tiny_spec, device="cuda", is_profiled=True, off=("compile",))
    found = measure(spec)
    assert 0 < found["gpu_ms"] <= found["wall_ms"] * 1.05
    assert found["synchronisations"] >= 0
    assert found["parts"]["products"] > 0
    assert sum(found["parts"].values()) == pytest.approx(found["gpu_ms"], rel=0.2)
