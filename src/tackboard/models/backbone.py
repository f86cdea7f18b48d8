"""The backbones by name: what stands between the vectors of events and the predictions.

In: packed tokens [T, D], the lengths of their rows, and times where it reads any. Out: hidden vectors of the same
shape; no token sees a later one of its row, nor one of another. Every model takes its backbone from here. A further
backbone is a module of its own with this signature, and a line in BACKBONES.

Decided: one config describes all kinds. A setting that a kind does not have stays at its default, and another value is
an error: nobody should search for what it does.
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
    """The settings of BackboneConfig that not every kind has, and this one has."""
    positions: tuple[str, ...] = POSITIONS
    """The encodings of positions that it can have."""


BACKBONES = {
    "gpt": Backbone(Decoder, ("mlp_ratio", "time_bias")),
    "hstu": Backbone(HSTU, ("head_width",)),
    "sasrec": Backbone(SASRec, ("ffn_width",), ("learned", "none")),
}
SPECIAL_SETTINGS = {name for backbone in BACKBONES.values() for name in backbone.settings}
"""The settings that not every kind has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Which backbone, and its sizes."""

    kind: str = "gpt"
    """`gpt`: a pre-norm decoder; `hstu`: pointwise attention and gates, without MLPs; `sasrec`: SASRec's layers."""
    num_layers: int = 2
    """Layers."""
    num_heads: int = 2
    """Attention heads; must divide the model's width where head_width is 0."""
    head_width: int = 0
    """Width of queries, keys and values of a head of hstu; 0: the model's width over num_heads, as others have it."""
    mlp_ratio: int = 4
    """Width of the MLP of a gpt block over the model's width."""
    ffn_width: int = 50
    """Width of the hidden layer of sasrec's pointwise network."""
    positions: str = "learned"
    """How order enters: `learned` vectors per place, `rotary` turns by place (not with sasrec), or `none`."""
    time_bias: int = 0
    """Buckets of log2(seconds from one event to another) by which gpt's attention is biased; 0 leaves that out. hstu
    always has a bias of its own."""

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
        """Whether the backbone needs the events' times."""
        return self.time_bias > 0 or self.kind == "hstu"

    def check_width(self, width: int) -> None:
        """Raises ConfigError where heads cannot share a model's width."""
        fits = self.head_width > 0 or width % self.num_heads == 0
        check(fits, "model.backbone.num_heads", self.num_heads, f"a divisor of width {width}")

    def build(self, **sizes: Any) -> nn.Module:
        """A backbone with fresh parameters. `sizes` are width, max_positions and dropout, and what shall be other than
        here."""
        backbone = BACKBONES[self.kind]
        names = ("num_layers", "num_heads", "positions", *backbone.settings)
        return backbone.module(**({name: getattr(self, name) for name in names} | sizes))


def without_unread(values: Any, kind: str) -> Any:
    """The flat settings of a model of an older version, less those that its kind of backbone has never read.

    Older versions allowed these. `kind` is the one that settings without any mean; what is not flat stays as it is.
    """
    kind = values.get("backbone", kind) if isinstance(values, dict) else ""
    if not isinstance(kind, str) or kind not in BACKBONES:
        return values
    unread = SPECIAL_SETTINGS.difference(BACKBONES[kind].settings)
    return {name: value for name, value in values.items() if name not in unread}
