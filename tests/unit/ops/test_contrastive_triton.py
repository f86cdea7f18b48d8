"""The kernels of the contrastive loss: equal to the definition in the interpreter, and compiled for two GPUs."""

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


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("own", [contrastive_triton.OWN, contrastive_triton.OWN_BEFORE])
@pytest.mark.parametrize("name", ["forward_kernel", "hidden_kernel", "items_kernel"])
def test_kernels_compile_ahead(name: str, own: int, width: int) -> None:
    kernel = getattr(contrastive_triton, name)
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("hidden_pointer", "items_pointer"), "*bf16")
    types |= dict.fromkeys(("group_pointer", "seen_pointer", "left_out_pointer"), "*i64")
    types |= dict.fromkeys(("log_weights_pointer", "log_sums_pointer", "slopes_pointer", "gradient_pointer"), "*fp32")
    types["own_pointer"] = "*u8" if own == contrastive_triton.OWN else "*i32"
    sizes = contrastive_triton.tile_sizes(width)
    constants = {"D": width, "HAS_OWN": own, "HAS_LEFT_OUT": False}
    constants |= {block: sizes[block] for block in ("BLOCK_R", "BLOCK_M", "BLOCK_D")}
    compile_ahead(kernel, types, constants, num_warps=sizes["num_warps"])
