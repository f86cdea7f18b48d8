"""The table kernels: interpreted and on a GPU against their twin, compiled ahead, and with more than 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_runs import compile_ahead, run_cases

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
