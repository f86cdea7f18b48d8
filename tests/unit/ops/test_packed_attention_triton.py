"""The kernels of packed attention: equal to their twin when interpreted and on a GPU, and compiled ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_runs import TARGETS, run_cases

pytest.importorskip("triton", reason="Triton is in the dev group of the install")
WIDTHS = [("*fp32", 64), ("*fp32", 128), ("*bf16", 64), ("*bf16", 256), ("*fp16", 16)]
"""Types of queries, keys and values, each with a width of heads. The widest heads need most shared memory."""
SHARED_BYTES = {80: 166_912, 90: 232_448}
"""Shared memory that a block of threads may use, by compute capability."""
INDEXES = dict.fromkeys(("offsets", "row_tiles", "block_rows", "block_starts"), "*i32")
TIMES = dict.fromkeys(("known", "asked", "boundaries"), "*i64") | {"tiles": "*u8"}
FLOATS = dict.fromkeys(("lse", "delta", "position", "time", "dposition", "dtime"), "*fp32")
COUNTS = ("num_tokens", "num_heads", "d", "num_groups", "num_distances", "num_boundaries", "num_buckets", "bound")
STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
NUMBERS = dict.fromkeys((*COUNTS, *STRIDES), "i32") | dict.fromkeys(("scale", "share", "units"), "fp32")


def test_the_cases_hold_in_the_interpreter() -> None:
    run_cases("packed_attention_cases.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_the_cases_hold_on_the_gpu() -> None:
    run_cases("packed_attention_cases.py", "cuda")


def compile_within_memory(kernel: Any, pointer: str, width: int, constants: dict[str, Any]) -> None:
    """Compiles a kernel for all targets as it is launched, and checks that its shared memory is there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tackboard.ops.packed_attention_triton import BLOCK, launch_options

    constants = constants | {"WIDTH": width, "SIZE": BLOCK, "PRECISION": "ieee"}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    values = dict.fromkeys(("q", "k", "v", "read", "dread", "dq", "dk", "dv"), pointer)
    types = {**values, **INDEXES, **TIMES, **FLOATS, **NUMBERS, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types[name] for name in kernel.arg_names}
    for capability in TARGETS:
        compiled = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", capability, 32),
            options=launch_options(width, 4 if pointer == "*fp32" else 2),
        )
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel


# Compiling takes a few seconds for each kernel, unless Triton's cache has it.
@pytest.mark.slow
@pytest.mark.parametrize("is_softmax", [True, False])
@pytest.mark.parametrize(("pointer", "width"), WIDTHS)
def test_kernels_compile_without_a_gpu(pointer: str, width: int, is_softmax: bool) -> None:
    from tackboard.ops import packed_attention_triton as kernels

    constants = {"SOFTMAX": is_softmax, "POSITION": not is_softmax, "TIME": True, "STORED": True}
    constants |= {"STEPS": 5 if is_softmax else 7}
    compile_within_memory(kernels.forward_kernel, pointer, width, constants)
    compile_within_memory(kernels.bias_kernel, pointer, width, constants)
    for of_queries in (True, False):
        of_kernel = {"OF_QUERIES": of_queries, "BY_BUCKET": is_softmax and of_queries}
        compile_within_memory(kernels.backward_kernel, pointer, width, constants | of_kernel)


def test_one_kernel_compiles_without_a_gpu() -> None:
    from tackboard.ops import packed_attention_triton as kernels

    constants = {"SOFTMAX": False, "POSITION": True, "TIME": True, "STORED": True, "STEPS": 5}
    compile_within_memory(kernels.bias_kernel, "*bf16", 32, constants)
    compile_within_memory(kernels.tiles_kernel, "*bf16", 32, constants)
