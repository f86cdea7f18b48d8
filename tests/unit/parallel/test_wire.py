"""Codecs of rows and gradients: error, size, what must not be hidden, and the counts, in one process."""

from __future__ import annotations

import math

import pytest
import torch

from tackboard.core.errors import ConfigError
from tackboard.parallel import wire
from tackboard.parallel.config import PRECISIONS, ParallelConfig
from tackboard.parallel.wire import DIRECTIONS, WireCodec, WireCounter, codecs, coding_of, id_type

CPU = torch.device("cpu")
BOUNDS = {
    "forward": {"fp32": 0.0, "fp16": 3e-4, "bf16": 2e-3, "fp8": 0.04, "int8": 0.04, "mx4": 0.15},
    "backward": {"fp32": 0.0, "fp16": 1e-3, "bf16": 2e-3, "fp8": 0.08, "int8": 0.08, "mx4": 0.15},
}
"""Largest relative error (L2) of realistic rows and gradients."""
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def sent(rows_ND: torch.Tensor, precision: str, direction: str) -> torch.Tensor:
    """The rows as they arrive."""
    coding = coding_of(precision, direction, rows_ND.shape[1])
    coded_NB = coding.encode(rows_ND)
    assert (coded_NB.dtype, coded_NB.shape) == (torch.uint8, (len(rows_ND), coding.row_bytes))
    assert coded_NB.is_contiguous()
    arrived_ND = coding.decode(coded_NB)
    assert (arrived_ND.dtype, arrived_ND.shape) == (torch.float32, rows_ND.shape)
    return arrived_ND


def relative_errors(rows_ND: torch.Tensor, arrived_ND: torch.Tensor) -> torch.Tensor:
    wanted_ND = rows_ND.double()
    return (arrived_ND.double() - wanted_ND).norm(dim=1) / wanted_ND.norm(dim=1)


def normal(num_rows: int, width: int, std: float = 0.1) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(3)) * std


def gradients(num_rows: int, width: int) -> torch.Tensor:
    """Rows whose sizes differ by nine powers of ten: those of a large batch's mean loss are about 1e-8."""
    return normal(num_rows, width, 1.0) * torch.logspace(-9, 0, num_rows)[:, None]


@every_precision
@pytest.mark.parametrize("width", [8, 16, 32, 48, 64])
def test_rows_arrive_within_the_bound(precision: str, width: int) -> None:
    rows_ND = normal(500, width)
    errors_N = relative_errors(rows_ND, sent(rows_ND, precision, "forward"))
    assert errors_N.square().mean().sqrt() <= BOUNDS["forward"][precision]


@every_precision
@pytest.mark.parametrize("width", [32, 64])
def test_small_gradients_arrive_as_well_as_large_ones(precision: str, width: int) -> None:
    rows_ND = gradients(1000, width)
    errors_N = relative_errors(rows_ND, sent(rows_ND, precision, "backward"))
    for tenth_N in errors_N.chunk(10):
        # The smallest tenth lies below 1e-8, where fp16 has few digits even after its factor.
        bound = 0.01 if precision == "fp16" else BOUNDS["backward"][precision]
        assert tenth_N.square().mean().sqrt() <= bound


@every_precision
@every_direction
def test_one_large_value_does_not_ruin_other_rows(precision: str, direction: str) -> None:
    rows_ND = normal(50, 32)
    alone_ND = sent(rows_ND, precision, direction)
    rows_ND[7] *= 1000
    other = torch.arange(50) != 7
    assert torch.equal(sent(rows_ND, precision, direction)[other], alone_ND[other])


@every_precision
@every_direction
def test_zeros_one_row_and_no_row(precision: str, direction: str) -> None:
    assert torch.equal(sent(torch.zeros(3, 32), precision, direction), torch.zeros(3, 32))
    assert sent(torch.empty(0, 32), precision, direction).shape == (0, 32)
    rows_ND = normal(5, 32)
    assert torch.equal(sent(rows_ND[2:3], precision, direction), sent(rows_ND, precision, direction)[2:3])


@every_precision
@every_direction
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(precision: str, direction: str, value: float) -> None:
    rows_ND = normal(4, 32)
    alone_ND = sent(rows_ND, precision, direction)
    rows_ND[1, 5] = value
    arrived_ND = sent(rows_ND, precision, direction)
    assert not arrived_ND[1, 5].isfinite()
    assert torch.equal(arrived_ND[[0, 2, 3]], alone_ND[[0, 2, 3]])


@every_precision
@every_direction
@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 1e38])
def test_extreme_values_stay_finite(precision: str, direction: str, size: float) -> None:
    rows_ND = normal(50, 32, size / 8)
    arrived_ND = sent(rows_ND, precision, direction)
    assert arrived_ND.isfinite().all()
    if precision == "fp16":
        limit = 65504.0 / (wire.FP16_GRADIENT_FACTOR if direction == "backward" else 1.0)
        assert torch.equal(arrived_ND, rows_ND.clamp(-limit, limit) if size > 1 else torch.zeros(50, 32))
    else:
        bound = BOUNDS[direction][precision]
        assert relative_errors(rows_ND, arrived_ND).square().mean().sqrt() <= bound


@pytest.mark.parametrize(
    ("precision", "width", "row_bytes"),
    [
        ("fp32", 32, 128),
        ("fp16", 32, 64),
        ("bf16", 64, 128),
        ("fp8", 32, 34),
        ("fp8", 64, 66),
        ("fp8", 16, 18),
        ("fp8", 7, 9),
        ("int8", 32, 34),
        ("int8", 64, 66),
        ("mx4", 32, 17),
        ("mx4", 64, 34),
        ("mx4", 48, 27),
        ("mx4", 8, 5),
    ],
)
def test_bytes_of_a_row(precision: str, width: int, row_bytes: int) -> None:
    assert coding_of(precision, "forward", width).row_bytes == row_bytes
    assert coding_of(precision, "backward", width).row_bytes == row_bytes


@pytest.mark.parametrize("width", range(32, 65, 4))
def test_promised_shares(width: int) -> None:
    for precision, share in {"fp8": 0.28, "int8": 0.32, "bf16": 0.5, "fp16": 0.5}.items():
        assert coding_of(precision, "forward", width).row_bytes <= share * 4 * width


def test_mx4_codes_each_value_as_the_nearest_one() -> None:
    """The twin looks at all fifteen values of four bits, and at every exponent that clips nothing."""
    rows_ND = normal(40, 32)
    values = torch.tensor([sign * value for value in wire.MX4_VALUES for sign in (1, -1)])
    arrived_ND = sent(rows_ND, "mx4", "forward")
    for row_D, got_D in zip(rows_ND, arrived_ND, strict=True):
        scale = min(2.0**power for power in range(-20, 20) if 6 * 2.0**power >= row_D.abs().max())
        nearest_D = (row_D[:, None] - scale * values).abs().argmin(dim=1)
        assert torch.equal(got_D, scale * values[nearest_D])


def test_mx4_refuses_widths_that_it_cannot_group() -> None:
    with pytest.raises(ConfigError) as error:
        coding_of("mx4", "backward", 12)
    assert "parallel.backward_precision is mx4" in error.value.got and "width 12" in error.value.got
    assert error.value.fix == "--set parallel.backward_precision=fp8"


@every_precision
@every_direction
def test_the_codec_of_torchrec_is_the_coding_on_a_flat_tensor(precision: str, direction: str) -> None:
    coding = coding_of(precision, direction, 32)
    codec = WireCodec(coding, 32, direction, None)
    rows_ND = normal(6, 64)[:, ::2]  # not contiguous, as a gradient may be
    coded = codec.encode(rows_ND, codec.create_context())
    assert (coded.dtype, coded.shape) == (codec.quantized_dtype, (codec.calc_quantized_size(6 * 32),))
    assert torch.equal(codec.decode(coded), coding.decode(coding.encode(rows_ND)).view(-1))
    assert codec.calc_quantized_size(0) == 0


def test_rows_of_half_precision_arrive_as_fp32() -> None:
    codec = WireCodec(coding_of("fp32", "forward", 32), 32, "forward", None)
    rows_ND = normal(3, 32).half()
    assert torch.equal(codec.decode(codec.encode(rows_ND)), rows_ND.float().view(-1))


def test_counts() -> None:
    counter = WireCounter(id_bytes=4)
    forward = WireCodec(coding_of("int8", "forward", 32), 32, "forward", counter)
    backward = WireCodec(coding_of("bf16", "backward", 32), 32, "backward", counter)
    assert counter.report()["total"] == {"payload_bytes": 0, "fp32_bytes": 0, "share": 1.0}
    for num_rows in (3, 0, 4):
        forward.encode(normal(num_rows, 32))
    forward.decode(torch.zeros(5 * 34, dtype=torch.uint8))
    backward.encode(normal(5, 32))
    backward.decode(torch.zeros(7 * 64, dtype=torch.uint8))
    assert counter.report() == {
        "forward": {"rows": 7, "payload_bytes": 7 * 34, "fp32_bytes": 7 * 128, "share": 0.2656},
        "backward": {"rows": 5, "payload_bytes": 5 * 64, "fp32_bytes": 5 * 128, "share": 0.5},
        "ids": {"ids": 5, "payload_bytes": 20},
        "total": {"payload_bytes": 238 + 320 + 20, "fp32_bytes": 896 + 640 + 20, "share": 0.3715},
    }


def test_ids_are_short_where_rows_allow() -> None:
    assert id_type(2**31 - 1) is torch.int32
    assert id_type(2**31) is torch.int64


def test_fp32_needs_no_codec() -> None:
    assert codecs(ParallelConfig(), width=32, device=CPU) is None


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise NotImplementedError("not implemented for 'Float8_e5m2'")

    monkeypatch.setattr(wire.ScaledCoding, "encode", fail)
    config = ParallelConfig(forward_precision="fp16", backward_precision="fp8")
    with pytest.raises(ConfigError) as error:
        codecs(config, width=20, device=CPU)
    assert error.value.got == "parallel.backward_precision is fp8, which torch cannot convert on cpu"
    assert error.value.allowed == "allowed on cpu: fp32, fp16, bf16"
    assert error.value.fix == "--set parallel.backward_precision=bf16"


@pytest.mark.gpu
@every_precision
@every_direction
def test_a_gpu_codes_as_a_cpu(precision: str, direction: str) -> None:
    rows_ND = torch.cat([normal(200, 64), gradients(200, 64)])
    coding = coding_of(precision, direction, 64)
    coded_NB = coding.encode(rows_ND.cuda())
    assert torch.equal(coded_NB.cpu(), coding.encode(rows_ND))
    assert torch.equal(coding.decode(coded_NB).cpu(), coding.decode(coded_NB.cpu()))
