"""The guard of `triton_runs`: bf16 products are refused by the interpreter, fp32 and fp16 products are right."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places), input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products(dtype: torch.dtype, device: str) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out = torch.empty(16, 16, device=device)
    if device == "cpu" and dtype == torch.bfloat16:
        with pytest.raises(Exception, match="bf16 wrongly"):
            product[(1,)](a, b, out, SIZE=16)
        return
    product[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)
