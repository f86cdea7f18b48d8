"""Looks up rows of sub-tables and updates them by row-wise Adagrad, with kernels on a GPU, elsewhere in plain PyTorch.

The input is a weight that holds k sub-tables one after another, and each item's row in each sub-table. `lookup` returns
the concatenated rows of each item, and the numbers of the rows that were read. `row_wise_adagrad_` takes these numbers
and the gradients of the rows, and updates the weight in place. A negative row is padding: it reads zeros and is never
updated.

Decided: on a GPU nothing waits for the device and no shape depends on data. The learning rate, the rounding key and the
flag `keep` are numbers on the device. If `keep` is false, an update changes nothing. So the flag may be the result of a
check that the host has not seen yet, and a CUDA graph can contain the update. Gradients of repeated rows are added in a
fixed order, so a repeated update gives the same bits. A row number beyond the end of the weight raises IndexError,
except on a GPU: there the row reads as NaN and is never updated. To raise an error, the host would have to wait for
the GPU.

Shapes: M items, k sub-tables, d width of a row, D = k × d width of a vector, R rows of the weight, L = M × k rows read.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

from tackboard.core.errors import DataError
from tackboard.ops import table_rows_reference

STORAGES = (torch.float32, torch.float16, torch.bfloat16)
OUTPUTS = (torch.float32, torch.bfloat16)


def lookup(
    weight_Rd: torch.Tensor,
    item_rows_MK: torch.Tensor,
    first_rows_K: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the vectors of items [M, D] as `dtype`, and the numbers of the rows that were read [L].

    Sub-table k begins at row `first_rows_K[k]` of the weight. The row numbers are int32 if the weight has fewer than
    2^31 rows, else int64. int32 is preferred because it is sorted faster. Padding has row number -1.
    """
    if weight_Rd.dtype not in STORAGES or dtype not in OUTPUTS:
        raise DataError(
            f"cannot look up rows of {weight_Rd.dtype} as {dtype}",
            allowed="allowed: rows of float32, float16 or bfloat16, looked up as float32 or bfloat16",
        )
    if item_rows_MK.dim() != 2 or first_rows_K.shape != item_rows_MK.shape[1:]:
        raise DataError(
            f"rows have shape {tuple(item_rows_MK.shape)} and first rows have shape {tuple(first_rows_K.shape)}",
            allowed="allowed: rows [M, k] with first rows [k]",
        )
    vectors_MD, rows_L = _implementation(weight_Rd.is_cuda).lookup(weight_Rd, item_rows_MK, first_rows_K, dtype)
    return vectors_MD, rows_L


def row_wise_adagrad_(
    weight_Rd: torch.Tensor,
    sums_R: torch.Tensor,
    rows_L: torch.Tensor,
    gradient_Ld: torch.Tensor,
    *,
    learning_rate: torch.Tensor,
    keep: torch.Tensor,
    clip_element: float,
    eps: float,
    rounding_key: torch.Tensor | int,
) -> None:
    """Updates the weight and the running sums in place; changes nothing if `keep` (bool, no dimension) is false.

    Gradients of the same row are added first, and each element of the total is clipped to ±`clip_element`. The mean
    square of a row's total is added to the row's running sum (fp32), and the row moves by
    `learning_rate` × total / (√sum + `eps`), computed in fp32. `learning_rate` is an fp32 tensor without dimensions.
    A row whose running sum is still 0 does not move, because checkpoints find the moved rows by their sums.
    Half-precision rows are rounded by `ops.stochastic_rounding` with `rounding_key`.
    """
    shapes = (tuple(weight_Rd.shape), tuple(sums_R.shape), tuple(rows_L.shape), tuple(gradient_Ld.shape))
    wanted = ((len(sums_R), weight_Rd.shape[-1]), (len(weight_Rd),), (len(gradient_Ld),), (len(rows_L), shapes[0][-1]))
    if shapes != wanted:
        raise DataError(
            f"weight, sums, rows and gradient have the shapes {shapes}", allowed="allowed: [R, d], [R], [L] and [L, d]"
        )
    if weight_Rd.dtype not in STORAGES or sums_R.dtype != torch.float32:
        raise DataError(
            f"cannot update rows of {weight_Rd.dtype} with sums of {sums_R.dtype}",
            allowed="allowed: rows of float32, float16 or bfloat16, with sums of float32",
        )
    if not (weight_Rd.is_contiguous() and sums_R.is_contiguous()):
        raise DataError("cannot update a weight whose memory has gaps", allowed="allowed: contiguous weight and sums")
    _implementation(weight_Rd.is_cuda).row_wise_adagrad_(
        weight_Rd,
        sums_R,
        rows_L,
        gradient_Ld,
        learning_rate=learning_rate,
        keep=keep,
        clip_element=clip_element,
        eps=eps,
        rounding_key=rounding_key,
    )


@functools.cache
def _implementation(is_cuda: bool) -> ModuleType:  # noqa: FBT001
    if is_cuda and importlib.util.find_spec("triton") is not None:
        from tackboard.ops import table_rows_triton

        return table_rows_triton
    if is_cuda:
        from tackboard.core.progress import say

        say("warning: Triton is not installed, so plain PyTorch updates tables: it is slower and waits for the GPU")
    return table_rows_reference
