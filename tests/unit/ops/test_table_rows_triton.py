"""The table kernels: interpreted and on a GPU against their twin, compiled ahead, and with more than 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_runs import compile_ahead, run_cases

from tackboard.ops.table_rows import lookup, row_wise_adagrad_

pytest.importorskip("triton", reason="Triton is in the dev group of the install")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def test_the_cases_hold_in_the_interpreter() -> None:
    run_cases("table_rows_cases.py", "cpu", "triton_runs_cases.py")


@pytest.mark.gpu
@gpu
def test_the_cases_hold_on_the_gpu() -> None:
    run_cases("table_rows_cases.py", "cuda", "triton_runs_cases.py")


@pytest.mark.parametrize("storage", POINTERS)
def test_kernels_compile_without_a_gpu(storage: torch.dtype) -> None:
    from tackboard.ops import table_rows_triton as kernels

    shape: dict[str, Any] = {"WIDTH": 32, "COLUMNS": 32}
    compile_ahead(
        kernels.lookup_kernel,
        {"weight": POINTERS[storage], "item_rows": "*i64", "first_rows": "*i64", "vectors": "*bf16", "rows": "*i32"}
        | {"num_entries": "i32", "num_rows": "i32"},
        shape | {"TABLES": 8, "ENTRIES": kernels.LOOKUP_ELEMENTS // 32},
    )
    tensors = {"weight": POINTERS[storage], "sums": "*fp32", "rows": "*i32", "partial": "*fp32"}
    numbers = {"learning_rate": "*fp32", "keep": "*u8", "rounding_key": "*i64", "num_entries": "i32", "num_rows": "i32"}
    numbers |= {"clip_element": "fp32", "eps": "fp32"}
    constants = shape | {"ENTRIES": kernels.TILE_ENTRIES} | kernels.format_constants(storage)
    compile_ahead(kernels.update_tiles_kernel, tensors | {"order": "*i64", "gradient": "*fp32"} | numbers, constants)
    compile_ahead(kernels.update_crossing_rows_kernel, tensors | numbers, constants)


@pytest.mark.gpu
@gpu
def test_rows_beyond_2_to_the_31_elements_are_read_and_updated() -> None:
    num_rows, width = 70_000_000, 32  # 4.5 GB in fp16
    weight = torch.zeros(num_rows, width, dtype=torch.float16, device="cuda")
    sums = torch.zeros(num_rows, device="cuda")
    item_rows = torch.tensor([[0, 1], [num_rows // 2 - 1, num_rows // 2 - 1]], device="cuda")
    first_rows = torch.tensor([0, num_rows // 2], device="cuda")
    weight[-1] = 3.0
    vectors, rows = lookup(weight, item_rows, first_rows)
    assert rows.tolist() == [0, num_rows // 2 + 1, num_rows // 2 - 1, num_rows - 1]
    assert vectors[1, width:].tolist() == [3.0] * width
    number = {"learning_rate": torch.tensor(0.5, device="cuda"), "keep": torch.tensor(True, device="cuda")}
    ones = torch.ones(4, width, device="cuda")
    row_wise_adagrad_(weight, sums, rows, ones, clip_element=1.0, eps=0.0, rounding_key=1, **number)
    assert sums.nonzero().flatten().tolist() == sorted(rows.tolist())
    assert weight[-1].tolist() == [2.5] * width
    assert weight.any(dim=1).nonzero().flatten().tolist() == sorted(rows.tolist())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("storage", POINTERS)
def test_an_update_waits_for_nothing_repeats_its_bits_and_fits_into_a_graph(storage: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    rows = (torch.rand(40_000, generator=generator, device="cuda") ** 8 * 5001).int() - 1
    gradient = torch.randn(40_000, 16, generator=generator, device="cuda")
    number = {"learning_rate": torch.tensor(0.5, device="cuda"), "keep": torch.tensor(True, device="cuda")}
    key = torch.tensor(5, device="cuda")
    results = []
    for way in ("first", "again", "graph"):
        weight, sums = torch.ones(5000, 16, device="cuda", dtype=storage), torch.zeros(5000, device="cuda")
        arguments = (weight, sums, rows, gradient)
        if way == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                row_wise_adagrad_(*arguments, clip_element=1.0, eps=1e-8, rounding_key=key, **number)
            graph.replay()
        else:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                row_wise_adagrad_(*arguments, clip_element=1.0, eps=1e-8, rounding_key=5, **number)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append((weight, sums))
    for weight, sums in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(sums, results[0][1])
