"""The kernel of the contrastive loss: equal to the definition in the interpreter, and compiled for two GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tested")

from triton_runs import compile_ahead, run_cases

from tackboard.ops import contrastive_triton


def test_interpreted_kernels_equal_the_definition() -> None:
    run_cases("contrastive_cases.py")


@pytest.mark.gpu
def test_compiled_kernels_equal_the_definition() -> None:
    run_cases("contrastive_cases.py", "cuda")


@pytest.mark.parametrize("own", [contrastive_triton.NO_OWN, contrastive_triton.OWN, contrastive_triton.OWN_BEFORE])
def test_the_kernel_compiles_ahead(own: int) -> None:
    kernel = contrastive_triton.powers_kernel
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"scores": "*fp16", "first_sum": "i32", "num_negatives": "i32"}
    lists = ("own_offsets", "own_items", "own_places", "group_of_sum", "seen_of_sum", "pair_items", "order", "begins")
    types |= dict.fromkeys(lists, "*i64")
    constants = {"HAS_OWN": own, "HAS_LEFT_OUT": own == contrastive_triton.NO_OWN}
    constants |= {"BLOCK": contrastive_triton.BLOCK, "OWN_BLOCK": contrastive_triton.OWN_BLOCK}
    compile_ahead(kernel, types, constants, num_warps=8)
