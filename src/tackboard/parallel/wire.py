"""Encodes looked-up rows and their gradients before they are sent to other processes, and counts the bytes.

A process that looks rows up sends row ids to the processes that hold the rows and gets the rows back; later it sends
the gradients of the rows the same way. TorchRec sends both with an all-to-all and lets a codec change what is sent.
`codecs` makes the codecs that the settings ask for, one per direction. A coded row is a row of bytes:

    precision   bytes of a row of width d    d = 32   d = 64   relative error (of normal values, rows / gradients)
    fp32        4 d                          128      256      none
    fp16        2 d                           64      128      0.02%
    bf16        2 d                           64      128      0.2%
    fp8         d codes + 2 of scale          34       66      2.5% (e4m3) / 5% (e5m2)
    int8        d codes + 2 of scale          34       66      0.6%
    mx4         d/2 codes + d/32 exponents    17       34      about 11%

Decided: every codec is plain PyTorch, so all devices encode alike. FBGEMM's codecs were measured first (CPU, fbgemm
1.8.0). Its INT8 adds 1e-8 to the range of a row, so its error is 45% on gradients of size 1e-8 and over 200% on smaller
gradients. INT8 turns NaN into a finite number, FP16 and BF16 turn infinity into a finite number, MX4 does both, and FP8
does not run on a CPU.

Decided: a value that is not finite arrives as a value that is not finite, so that the guard of the training loop sees
it. In fp8, int8 and mx4, all values that share a scale with this value are lost too.

Decided: fp8 and int8 have one scale for each row. Narrow rows do not share a scale, because TorchRec does not tell a
codec where the rows for one process end and the rows for the next process begin. So a row of width 16 takes 28.1% of
the bytes of fp32, and a row of width 8 takes 31.3%. With column-wise sharding, each process's part counts as a row.

Decided: gradients are multiplied by 2^12 before they become fp16, and divided by 2^12 on arrival. The mean loss of a
large batch has gradients of about 1e-8, and fp16 has no number between 0 and 6e-8. Finite values beyond fp16's range
become its largest number.

Shapes: N rows, D width of a row, B bytes of a coded row, G groups of values that share a scale in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Protocol

import torch

from tackboard.core.errors import ConfigError
from tackboard.parallel.config import PRECISIONS, ParallelConfig

DIRECTIONS = ("forward", "backward")
FP16_GRADIENT_FACTOR = 2.0**12
MX4_GROUP = 32
"""Number of values that share an exponent in mx4; fewer if the width of a row is not a multiple of this number."""
MX4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes that mx4 can express. A code of four bits has a sign and a magnitude."""


class Coding(Protocol):
    """How rows of one width become bytes. `decode` gives back fp32 rows."""

    row_bytes: int

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor: ...

    def decode(self, coded_NB: torch.Tensor) -> torch.Tensor: ...


class CastCoding:
    """Sends each value as a floating-point number of another type, after multiplying it by a power of two."""

    def __init__(self, width: int, dtype: torch.dtype, factor: float = 1.0) -> None:
        self.dtype, self.factor = dtype, factor
        self.row_bytes = width * dtype.itemsize

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        if self.dtype is torch.float16:
            limit = torch.finfo(torch.float16).max / self.factor
            rows_ND = torch.where(rows_ND.isinf(), rows_ND, rows_ND.clamp(-limit, limit)) * self.factor
        return rows_ND.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, coded_NB: torch.Tensor) -> torch.Tensor:
        rows_ND = coded_NB.view(self.dtype).float()
        return rows_ND if self.factor == 1 else rows_ND / self.factor


class ScaledCoding:
    """Sends one-byte codes of a row's values and one scale as bf16. The row's largest value has the largest code."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Symmetric, so int8's -128 is not used.
        self.limit = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
        self.row_bytes = width + 2

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        smallest = torch.finfo(torch.bfloat16).tiny
        scale_N1 = (rows_ND.abs().amax(1, keepdim=True) / self.limit).clamp_min(smallest).bfloat16()
        # The rounded scale may be a little too small for the largest value.
        scaled_ND = (rows_ND / scale_N1.float()).clamp(-self.limit, self.limit)
        codes_ND = (scaled_ND.round() if self.dtype is torch.int8 else scaled_ND).to(self.dtype)
        return torch.cat([codes_ND.view(torch.uint8), scale_N1.view(torch.uint8)], dim=1)

    def decode(self, coded_NB: torch.Tensor) -> torch.Tensor:
        codes_ND = coded_NB[:, :-2].reshape(-1).int()
        # A table is seven times as fast as the conversion of e4m3 on a CPU.
        rows_ND = _values_of_codes(self.dtype, coded_NB.device).index_select(0, codes_ND)
        scale_N1 = coded_NB[:, -2:].contiguous().view(torch.bfloat16).float()
        return rows_ND.view(len(coded_NB), self.row_bytes - 2) * scale_N1


class Mx4Coding:
    """Sends four bits for each value, and for each group of up to 32 values of a row an exponent of one byte.

    The exponent is the least one that lets the group's largest magnitude be coded without clipping it.
    """

    def __init__(self, width: int) -> None:
        self.group = math.gcd(width, MX4_GROUP)
        self.num_groups = width // self.group
        self.row_bytes = width // 2 + self.num_groups

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        groups_NGd = rows_ND.reshape(len(rows_ND), self.num_groups, self.group)
        largest_NG1 = groups_NGd.abs().amax(-1, keepdim=True)
        exponent_NG1 = torch.frexp(largest_NG1 / MX4_VALUES[-1]).exponent.clamp_min(-126) + 127
        exponent_NG1 = torch.where(largest_NG1.isfinite(), exponent_NG1, 255)
        scale_NG1 = _mx4_scales(rows_ND.device)[exponent_NG1]
        scaled_NGd = groups_NGd / scale_NG1
        magnitude_NGd = scaled_NGd.abs()
        codes_NGd = (scaled_NGd < 0).to(torch.uint8) * 8
        for below, above in itertools.pairwise(MX4_VALUES):
            codes_NGd += magnitude_NGd > (below + above) / 2
        codes_ND = codes_NGd.view(rows_ND.shape)
        packed = codes_ND[:, 0::2] | (codes_ND[:, 1::2] << 4)
        return torch.cat([packed, exponent_NG1.squeeze(-1).to(torch.uint8)], dim=1)

    def decode(self, coded_NB: torch.Tensor) -> torch.Tensor:
        packed = coded_NB[:, : -self.num_groups].reshape(-1).int()
        values = _mx4_pairs(coded_NB.device).index_select(0, packed)
        scale_NG = _mx4_scales(coded_NB.device)[coded_NB[:, -self.num_groups :].int()]
        rows_NGd = values.view(len(coded_NB), self.num_groups, self.group) * scale_NG[..., None]
        return rows_NGd.view(len(coded_NB), self.num_groups * self.group)


@functools.lru_cache
def _values_of_codes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


@functools.lru_cache
def _mx4_scales(device: torch.device) -> torch.Tensor:
    scales = torch.exp2(torch.arange(256, dtype=torch.float64, device=device) - 127).float()
    scales[255] = math.nan
    return scales


@functools.lru_cache
def _mx4_pairs(device: torch.device) -> torch.Tensor:
    signed = torch.tensor([*MX4_VALUES, *(-value for value in MX4_VALUES)], device=device)
    codes = torch.arange(256, device=device)
    return torch.stack([signed[codes % 16], signed[codes // 16]], dim=1)


def id_type(num_rows: int) -> torch.dtype:
    """Returns the type in which ids of `num_rows` rows are sent. TorchRec sends ids and lengths in the type it gets."""
    return torch.int32 if num_rows <= 2**31 - 1 else torch.int64


def coding_of(precision: str, direction: str, width: int) -> Coding:
    """Returns the coding of rows (`forward`) or of their gradients (`backward`). `width` is the width of a sent row."""
    is_gradient = direction == "backward"
    if precision == "fp16":
        return CastCoding(width, torch.float16, FP16_GRADIENT_FACTOR if is_gradient else 1.0)
    if precision in ("fp32", "bf16"):
        return CastCoding(width, torch.bfloat16 if precision == "bf16" else torch.float32)
    if precision == "fp8":
        return ScaledCoding(width, torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn)
    if precision == "int8":
        return ScaledCoding(width, torch.int8)
    if width % 8:
        raise ConfigError(
            f"parallel.{direction}_precision is mx4 and the rows that processes send each other have width {width}",
            allowed="allowed: a width that is a multiple of 8 (with column sharding, the width of one process's part)",
            fix=f"--set parallel.{direction}_precision=fp8",
        )
    return Mx4Coding(width)


@dataclasses.dataclass
class Traffic:
    """What was sent in one direction."""

    rows: int = 0
    payload_bytes: int = 0
    fp32_bytes: int = 0
    """Bytes that the same rows have in fp32."""


class WireCounter:
    """Counts what this process hands to the all-to-all: rows, their gradients and row ids.

    Bytes that a process hands over for itself are counted too, although they never leave the process: with p processes
    and ids that are spread evenly, the network carries (p - 1) / p of the bytes. A process gets one row back for each
    id that it sent, so ids are counted by the rows that come back. This also holds where TorchRec sends each distinct
    id once. The lengths of bags and the sizes of messages, which TorchRec sends along with ids, are not counted.
    """

    def __init__(self, id_bytes: int) -> None:
        self.id_bytes = id_bytes
        """Bytes of one row id: `id_type(num_rows).itemsize`, if ids are sent in that type."""
        self.num_ids = 0
        self.traffic = {direction: Traffic() for direction in DIRECTIONS}

    def report(self) -> dict[str, Any]:
        """Returns the counts since the start as plain JSON types. `share` is the ratio to the bytes of fp32 rows."""
        ids = self.num_ids * self.id_bytes
        sent = sum(traffic.payload_bytes for traffic in self.traffic.values())
        whole = sum(traffic.fp32_bytes for traffic in self.traffic.values())
        directions = {
            direction: dataclasses.asdict(traffic) | {"share": _share(traffic.payload_bytes, traffic.fp32_bytes)}
            for direction, traffic in self.traffic.items()
        }
        total = {"payload_bytes": sent + ids, "fp32_bytes": whole + ids, "share": _share(sent + ids, whole + ids)}
        return {**directions, "ids": {"ids": self.num_ids, "payload_bytes": ids}, "total": total}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


class WireCodec:
    """A coding in the form that TorchRec asks for (`torchrec.distributed.types.QuantizedCommCodec`)."""

    quantized_dtype = torch.uint8

    def __init__(self, coding: Coding, width: int, direction: str, counter: WireCounter | None) -> None:
        self.coding, self.width, self.direction, self.counter = coding, width, direction, counter

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        rows_ND = input_tensor.reshape(-1, self.width).float()
        coded_NB = self.coding.encode(rows_ND)
        if self.counter is not None:
            traffic = self.counter.traffic[self.direction]
            traffic.rows += len(rows_ND)
            traffic.payload_bytes += coded_NB.numel()
            traffic.fp32_bytes += rows_ND.numel() * 4
        return coded_NB.view(-1)

    def decode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        rows_ND = self.coding.decode(input_tensor.view(-1, self.coding.row_bytes))
        if self.counter is not None and self.direction == "forward":
            self.counter.num_ids += len(rows_ND)
        return rows_ND.view(-1)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len // self.width * self.coding.row_bytes

    def create_context(self) -> None:
        return None

    def padded_size(self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, ctx: None) -> Any:
        raise NotImplementedError("rows are sent one by one, never pooled")


def codecs(
    config: ParallelConfig, *, width: int, device: torch.device, counter: WireCounter | None = None
) -> dict[str, Any] | None:
    """Returns the `qcomm_codecs_registry` of an EmbeddingCollectionSharder.

    `width` is the width of a row that is sent: the width of the table, or, with column sharding, of one process's part.
    Without a counter, fp32 in both directions needs no codec, and the result is None. With a counter, fp32 rows are
    sent unchanged and counted. A precision that does not run on `device` raises ConfigError.
    """
    asked = {"forward": config.forward_precision, "backward": config.backward_precision}
    if counter is None and set(asked.values()) == {"fp32"}:
        return None
    made = {}
    for direction, precision in asked.items():
        coding = coding_of(precision, direction, width)
        if not _runs(coding, width, device):
            able = [name for name in PRECISIONS if name == "fp32" or _is_able(name, direction, width, device)]
            raise ConfigError(
                f"parallel.{direction}_precision is {precision}, which torch cannot convert on {device.type}",
                allowed=f"allowed on {device.type}: {', '.join(able)}",
                fix=f"--set parallel.{direction}_precision={able[-1]}",
            )
        made[direction] = WireCodec(coding, width, direction, counter)
    from torchrec.distributed.types import CommOp, QuantizedCommCodecs

    return {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: QuantizedCommCodecs(**made)}


def _is_able(precision: str, direction: str, width: int, device: torch.device) -> bool:
    try:
        return _runs(coding_of(precision, direction, width), width, device)
    except ConfigError:
        return False


def _runs(coding: Coding, width: int, device: torch.device) -> bool:
    """Returns whether a row of ones survives coding on this device. Every coding keeps ones almost exactly."""
    try:
        ones_1D = torch.ones(1, width, device=device)
        return torch.allclose(coding.decode(coding.encode(ones_1D)), ones_1D, rtol=0.01)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
