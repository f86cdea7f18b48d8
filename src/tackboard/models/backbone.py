"""Lists the backbones by name. A backbone is the stack of layers between the vectors of events and the predictions.

A backbone takes packed tokens [T, D], the lengths of their rows, and times if it reads them. It returns hidden vectors
of the same shape; a token sees neither later tokens nor other rows. Every model takes its backbone from here. To add a
backbone, write a module with a subclass of `decoder.LayerStack` and add a line to BACKBONES.

Decided: one config class describes all kinds of backbone. A setting that a kind does not have must stay at its default.
Any other value is an error, so that nobody sets a value that has no effect.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import nn

from tackboard.core.config import check
from tackboard.models.decoder import POSITIONS, Decoder
from tackboard.models.hstu import HSTU
from tackboard.models.sasrec import SASRec


class Backbone(NamedTuple):
    """A kind of backbone."""

    module: type[nn.Module]
    settings: tuple[str, ...]
    """The settings of this kind that some other kinds lack."""
    positions: tuple[str, ...] = POSITIONS
    """The encodings of positions that this kind supports."""


BACKBONES = {
    "gpt": Backbone(Decoder, ("mlp_ratio", "time_bias")),
    "hstu": Backbone(HSTU, ("head_width",)),
    "sasrec": Backbone(SASRec, ("ffn_width",), ("learned", "none")),
}
SPECIAL_SETTINGS = {name for backbone in BACKBONES.values() for name in backbone.settings}
"""The settings that only some kinds have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The kind of backbone, and its sizes."""

    kind: str = "gpt"
    """`gpt`: a pre-norm decoder; `hstu`: pointwise attention and gates, without MLPs; `sasrec`: SASRec's layers."""
    num_layers: int = 2
    """Number of layers."""
    num_heads: int = 2
    """Number of attention heads; must divide the model's width if head_width is 0."""
    head_width: int = 0
    """Width of the queries, keys, values and gates of each hstu head; 0 means width / num_heads, as in other kinds."""
    mlp_ratio: int = 4
    """Width of the MLP of a gpt block, as a multiple of the model's width."""
    ffn_width: int = 50
    """Width of the hidden layer of sasrec's pointwise network."""
    positions: str = "learned"
    """How the model reads the order of events: `learned` adds a vector per position, `rotary` rotates queries and keys
    (not with sasrec), `none` adds nothing. hstu also has its own position bias."""
    time_bias: int = 0
    """Number of buckets of log2(seconds between two events) for the time bias of gpt's attention; 0 means no bias. hstu
    always has its own time bias."""

    def __post_init__(self) -> None:
        check(self.kind in BACKBONES, "model.backbone.kind", self.kind, ", ".join(BACKBONES))
        for name in ("num_layers", "num_heads", "mlp_ratio", "ffn_width"):
            check(getattr(self, name) >= 1, f"model.backbone.{name}", getattr(self, name), "1 or more")
        check(self.head_width >= 0, "model.backbone.head_width", self.head_width, "0 or more")
        check(0 <= self.time_bias <= 64, "model.backbone.time_bias", self.time_bias, "0 to 64")
        backbone = BACKBONES[self.kind]
        allowed = ", ".join(backbone.positions)
        check(self.positions in backbone.positions, "model.backbone.positions", self.positions, allowed)
        for name in SPECIAL_SETTINGS.difference(backbone.settings):
            value, default = getattr(self, name), getattr(type(self), name)
            check(value == default, f"model.backbone.{name}", value, f"{default} with {self.kind}, which has no {name}")

    @property
    def reads_times(self) -> bool:
        return self.time_bias > 0 or self.kind == "hstu"

    def check_width(self, width: int) -> None:
        """Raises ConfigError if the number of heads must divide the model's width and does not."""
        fits = self.head_width > 0 or width % self.num_heads == 0
        check(fits, "model.backbone.num_heads", self.num_heads, f"a divisor of width {width}")

    def build(self, **sizes: Any) -> nn.Module:
        """Makes a backbone with fresh parameters. `sizes`: width, max_positions, dropout, and settings to override."""
        backbone = BACKBONES[self.kind]
        names = ("num_layers", "num_heads", "positions", *backbone.settings)
        return backbone.module(**({name: getattr(self, name) for name in names} | sizes))


def without_unread(values: Any, kind: str) -> Any:
    """Returns flat settings without those that the kind of backbone never reads.

    Older versions stored flat settings, and allowed settings that are never read. If the settings name no kind of
    backbone, `kind` applies. Nested settings, which today's version stores, are returned unchanged.
    """
    kind = values.get("backbone", kind) if isinstance(values, dict) else ""
    if not isinstance(kind, str) or kind not in BACKBONES:
        return values
    unread = SPECIAL_SETTINGS.difference(BACKBONES[kind].settings)
    return {name: value for name, value in values.items() if name not in unread}
