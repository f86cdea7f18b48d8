"""The backbones by name: each is built with the settings it has, and the settings it does not have are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tackboard.core.errors import ConfigError
from tackboard.models.backbone import BACKBONES, BackboneConfig, without_unread
from tackboard.models.decoder import Decoder
from tackboard.models.hstu import HSTU
from tackboard.models.sasrec import SASRec

SIZES = {"width": 8, "max_positions": 6, "dropout": 0.0}


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (BackboneConfig(mlp_ratio=3, time_bias=5, positions="rotary"), Decoder),
        (BackboneConfig(kind="hstu", head_width=3), HSTU),
        (BackboneConfig(kind="sasrec", ffn_width=7, positions="none"), SASRec),
    ],
    ids=BACKBONES,
)
def test_a_backbone_is_the_module_of_its_kind_with_its_settings(config: BackboneConfig, module: type) -> None:
    special = {name: getattr(config, name) for name in BACKBONES[config.kind].settings}
    torch.manual_seed(0)
    built = config.build(**SIZES)
    torch.manual_seed(0)
    direct = module(**SIZES, num_layers=2, num_heads=2, positions=config.positions, **special)
    assert type(built) is module
    expected = direct.state_dict()
    assert list(built.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in built.state_dict().items())


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_kind_has_the_same_signature(kind: str) -> None:
    config, lengths = BackboneConfig(kind=kind), torch.tensor([3, 0, 2])
    tokens, times = torch.randn(5, 8), torch.arange(5) * 1000
    for final_norm in (True, False):
        built = config.build(**SIZES, final_norm=final_norm)
        assert built(tokens, lengths, times, times + 500).shape == (5, 8)
        assert any(name.startswith("final_norm") for name in built.state_dict()) is final_norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "lstm"}, r"model\.backbone\.kind = 'lstm'.*gpt, hstu, sasrec"),
        ({"kind": "hstu", "mlp_ratio": 2}, "mlp_ratio = 2.*4 with hstu, which has no mlp_ratio"),
        ({"kind": "hstu", "time_bias": 9}, "time_bias = 9.*0 with hstu"),
        ({"ffn_width": 9}, "ffn_width = 9.*50 with gpt"),
        ({"head_width": 9}, "head_width = 9.*0 with gpt"),
        ({"kind": "sasrec", "mlp_ratio": 2}, "mlp_ratio = 2.*4 with sasrec"),
        ({"kind": "sasrec", "positions": "rotary"}, "positions = 'rotary'.*learned, none"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"kind": "sasrec", "ffn_width": 0}, "ffn_width = 0"),
        ({"kind": "hstu", "head_width": -1}, "head_width = -1"),
    ],
)
def test_a_setting_that_the_kind_does_not_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BackboneConfig(**settings)
    assert re.search(message, str(caught.value).replace("\n", " "))


def test_heads_share_the_width_unless_they_have_one_of_their_own() -> None:
    BackboneConfig(num_heads=4).check_width(8)
    BackboneConfig(kind="hstu", num_heads=3, head_width=5).check_width(8)
    with pytest.raises(ConfigError, match="a divisor of width 8"):
        BackboneConfig(num_heads=3).check_width(8)


def test_what_an_older_version_never_read_is_left_out_when_it_is_read() -> None:
    flat = {"backbone": "hstu", "mlp_ratio": 2, "time_bias": 9, "num_layers": 3}
    assert without_unread(flat, "gpt") == {"backbone": "hstu", "num_layers": 3}
    assert without_unread({"mlp_ratio": 2, "time_bias": 9}, "gpt") == {"mlp_ratio": 2, "time_bias": 9}
    assert without_unread({"ffn_width": 9}, "sasrec") == {"ffn_width": 9}
    for other in ({"backbone": {"kind": "hstu"}, "mlp_ratio": 2}, {"backbone": "lstm", "mlp_ratio": 2}, [], None):
        assert without_unread(other, "gpt") == other
