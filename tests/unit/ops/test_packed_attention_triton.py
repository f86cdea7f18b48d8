"""The kernels of packed attention: equal to their twin when interpreted and on a GPU, and compiled ahead."""

from __future__ import annotations

import pytest
import torch
from triton_runs import compile_ahead, run_cases

pytest.importorskip("triton", reason="Triton is in the dev group of the install")
POINTERS = {"*fp32": 64, "*bf16": 128, "*fp16": 40}
"""Types of queries, keys and values, each with a width of heads."""
INDEXES = dict.fromkeys(("offsets", "block_rows", "block_starts"), "*i32")
TIMES = dict.fromkeys(("known", "asked", "boundaries"), "*i64")
FLOATS = dict.fromkeys(("lse", "delta", "position", "time", "dposition", "dtime"), "*fp32")
NUMBERS = dict.fromkeys(
    (
        "q_token",
        "q_head",
        "k_token",
        "k_head",
        "v_token",
        "v_head",
        "num_tokens",
        "num_heads",
        "d",
        "num_groups",
        "num_distances",
        "num_boundaries",
        "num_buckets",
        "bound",
    ),
    "i32",
) | {"scale": "fp32", "share": "fp32"}


def test_the_cases_hold_in_the_interpreter() -> None:
    run_cases("packed_attention_cases.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_the_cases_hold_on_the_gpu() -> None:
    run_cases("packed_attention_cases.py", "cuda")


@pytest.mark.parametrize("is_softmax", [True, False])
@pytest.mark.parametrize("pointer", POINTERS)
def test_kernels_compile_without_a_gpu(pointer: str, is_softmax: bool) -> None:
    from tackboard.ops import packed_attention_triton as kernels

    values = dict.fromkeys(("q", "k", "v", "read", "dread", "dq", "dk", "dv"), pointer)
    types = {**values, **INDEXES, **TIMES, **FLOATS, **NUMBERS}
    width = max(16, 1 << (POINTERS[pointer] - 1).bit_length())
    constants = {"SOFTMAX": is_softmax, "POSITION": not is_softmax, "TIME": True, "STEPS": 5 if is_softmax else 7}
    constants |= {"WIDTH": width, "SIZE": kernels.BLOCK, "PRECISION": "ieee"}
    num_warps = 8 if width > 64 else 4
    compile_ahead(kernels.forward_kernel, types, constants, num_warps)
    compile_ahead(kernels.bias_kernel, types, constants, num_warps)
    for of_queries in (True, False):
        compile_ahead(kernels.backward_kernel, types, constants | {"OF_QUERIES": of_queries}, num_warps)
