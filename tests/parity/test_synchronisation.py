"""A training step of a prepared batch reads nothing from the device: no number, and no size that depends on data.

Without a GPU, a guard looks at every operation of the step and refuses those for which a GPU would have to wait. The
operations that have kernels of their own on a GPU run as their plain twins. On a GPU, torch itself refuses to wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_models import INPUTS, SHARED, VOCABULARY, histories_over_all_items
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import from_dict
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import hstu, sasrec
from tackboard.ops import contrastive, contrastive_reference, table_rows_reference

THREE_LOSSES = {"multi_token_weight": 0.5, "future_token_weight": 0.5, "future_token_anchor": 3}
CONFIGS: dict[str, Any] = {
    "pinfm": from_dict(PinFMConfig, SHARED | {"loss": THREE_LOSSES, "dropout": 0.1}),
    "pinfm, streaming frequencies": from_dict(PinFMConfig, SHARED | {"loss": {"streaming_frequencies": True}}),
    "pinfm, later negatives": from_dict(PinFMConfig, SHARED | {"loss": THREE_LOSSES | {"later_negatives": True}}),
    "pinfm, hstu": from_dict(PinFMConfig, SHARED | {"backbone": {"kind": "hstu"}, "request_time": True}),
    "pinfm, time bias": from_dict(PinFMConfig, SHARED | {"backbone": {"time_bias": 8}, "request_time": True}),
    "sasrec, sampled": sasrec(256, **INPUTS, loss={"num_negatives": 8}),
    "sasrec, mixed": sasrec(256, **INPUTS, request_vector="input", loss={"kind": "mixed"}),
    "hstu, full": hstu(256, **INPUTS, loss={"kind": "full"}),
}
CASES = [(name, pad) for name in CONFIGS for pad in (False, True) if not pad or name.startswith("pinfm")]
"""Only a PinFM pads."""
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
"""Operations that read a number, or whose result has a size that depends on data."""


class WaitedForTheDeviceError(AssertionError):
    """An operation for which a GPU would have to wait."""


class NeverCopies(TorchFunctionMode):
    """Raises WaitedForTheDeviceError if Python asks for a copy on the host. A CPU needs no operation for the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("cpu", "numpy", "tolist", "__array__"):
            raise WaitedForTheDeviceError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class NeverComputes(TorchDispatchMode):
    """Raises WaitedForTheDeviceError at an operation for which a GPU would have to wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        waits = name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits:
            raise WaitedForTheDeviceError(f"{func} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Inside this context, whatever waits for the device is an error."""
    with NeverCopies(), NeverComputes():
        yield


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: float(x.sum()),
        lambda x: bool((x > 1).any()),
        lambda x: x[x > 1],
        lambda x: x.masked_fill_(x > 1, 0).nonzero(),
        lambda x: x.unique(),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: x.tolist(),
        lambda x: x.__setitem__(x > 1, 0.0),
        lambda x: RowLayout.of_lengths(x.long()),
    ],
)
def test_the_guard_refuses_what_waits(operation: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(4.0)
    with never_waiting(), pytest.raises(WaitedForTheDeviceError):
        operation(x)


def lookup(
    weight_Rd: torch.Tensor, item_rows_MK: torch.Tensor, first_rows_K: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain lookup, which asks whether there is padding, without this question."""
    rows_MK = torch.where(item_rows_MK < 0, -1, item_rows_MK + first_rows_K)
    vectors_MKd = weight_Rd[rows_MK.clamp_min(0)].to(dtype) * (rows_MK >= 0)[:, :, None]
    return vectors_MKd.flatten(1), rows_MK.flatten()


def prepared(name: str, *, pad: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = CONFIGS[name].build(VOCABULARY).train()
    batch = histories_over_all_items(1, num_rows=40)
    batch = dataclasses.replace(batch, users=torch.arange(batch.num_rows) // 2)
    return model, model.prepare(batch, torch.Generator(), **({"pad": True} if pad else {}))


@pytest.mark.parametrize(("name", "pad"), CASES)
def test_a_step_reads_nothing_from_the_device(name: str, pad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = prepared(name, pad=pad)
    monkeypatch.setattr(contrastive, "choose", lambda _: contrastive_reference.contrastive_loss)
    monkeypatch.setattr(table_rows_reference, "lookup", lookup)
    with never_waiting():
        model.loss(batch).loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    with never_waiting(), pytest.raises(WaitedForTheDeviceError):
        model.loss(batch.with_targets(None))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "pad"), CASES)
def test_a_step_on_a_gpu_never_waits(name: str, pad: bool) -> None:
    model, batch = prepared(name, pad=pad)
    model, batch = model.cuda(), batch.to(torch.device("cuda"))
    model.loss(batch).loss.backward()  # Kernels are compiled and constants are copied at the first call.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.loss(batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
