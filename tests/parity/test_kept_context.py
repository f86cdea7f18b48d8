"""A context that was kept and extended gives candidates what a context that is read as a whole gives them."""

from __future__ import annotations

import pytest
import torch
from test_crossing import BACKBONES, WIDTH, backbone

from tackboard.batch.cross_layout import CrossLayout
from tackboard.batch.row_layout import RowLayout
from tackboard.models.decoder import LayerStack, ReadContext

LENGTH, NUM_CANDIDATES = 14, 5


class Row:
    """A row of tokens with their times, and candidates that read its first tokens."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.stack: LayerStack = backbone(name).to(dtype).eval()
        self.x, self.candidates = (
            torch.randn(LENGTH, WIDTH, dtype=dtype),
            torch.randn(NUM_CANDIDATES, WIDTH, dtype=dtype),
        )
        self.times = torch.randint(0, 10**8, (LENGTH,)).sort().values
        self.asked = self.times + torch.randint(0, 10**6, (LENGTH,))

    def layout(self, length: int) -> RowLayout:
        return RowLayout.of_lengths(torch.tensor([length]))

    def read(self, length: int) -> ReadContext:
        tokens = slice(0, length)
        parts = (self.layout(length), self.times[tokens], self.asked[tokens])
        return self.stack.read_context(self.x[tokens], *parts, needs_hidden=False)

    def extended(self, context: ReadContext, num_kept: int, length: int) -> ReadContext:
        new = slice(num_kept, length)
        kept = context.keep(num_kept)
        return self.stack.extend_context(kept, self.x[new], self.layout(length), self.times[new], self.asked[new])

    def hidden(self, context: ReadContext, length: int) -> torch.Tensor:
        rows = torch.zeros(NUM_CANDIDATES, dtype=torch.int64)
        crossing = CrossLayout.of(torch.tensor([0, length]), rows)
        return self.stack.cross(self.candidates, context, crossing, torch.full((NUM_CANDIDATES,), 2 * 10**8))


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_steps_of_growth_equal_reading_the_whole_row(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Each step drops the newest token, because it may depend on the request, and reads it again with new tokens."""
    row = Row(name, dtype)
    with torch.inference_mode():
        context, before = row.read(3), 3
        for length in (3, 4, 5, 9, LENGTH):
            context = row.extended(context, before - 1, length)
            whole = row.read(length)
            for found, expected in zip(context.layers, whole.layers, strict=True):
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            found, expected = row.hidden(context, length), row.hidden(whole, length)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            before = length


@pytest.mark.parametrize("name", BACKBONES)
def test_a_part_of_what_was_kept_can_be_extended(name: str) -> None:
    """Tokens before an event that arrived late are still right."""
    row = Row(name, torch.float64)
    with torch.inference_mode():
        kept = row.read(10).keep(10)
        row.x[4:], row.times[4:] = torch.randn(LENGTH - 4, WIDTH).double(), row.times[4:] + 5000
        row.asked[4:] = row.times[4:] + 7
        new = slice(4, LENGTH)
        context = row.stack.extend_context(
            kept.first(4), row.x[new], row.layout(LENGTH), row.times[new], row.asked[new]
        )
        torch.testing.assert_close(
            row.hidden(context, LENGTH), row.hidden(row.read(LENGTH), LENGTH), rtol=1e-9, atol=1e-9
        )


def test_what_is_kept_has_memory_of_its_own() -> None:
    """Keys and values are views of a tensor with the queries; keeping views would keep the queries too."""
    row = Row("gpt time", torch.float32)
    with torch.inference_mode():
        kept = row.read(8).keep(7)
    sizes = [part.untyped_storage().nbytes() for layer in kept.layers for part in layer]
    assert kept.times_T is not None
    assert kept.num_bytes == sum(sizes) + 7 * 8 == 2 * 2 * 7 * WIDTH * 4 + 7 * 8
    assert kept.first(3).num_tokens == 3
