"""The paper's size ladder in code."""

from __future__ import annotations

import pytest
import torch

from turbogr.errors import ConfigurationError
from turbogr.models.bias import TimeBuckets
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.sasrec import SASRec

# size -> (dim, blocks, width of a head, length)
LADDER = {
    "tiny": (128, 2, 16, 2048),
    "small": (256, 4, 32, 2048),
    "medium": (512, 8, 64, 2048),
    "large": (1024, 16, 128, 2048),
    "long": (1024, 16, 128, 4096),
}


def parameters(backbone):
    """Dense parameters without the position table."""
    return sum(p.numel() for name, p in backbone.named_parameters() if name != "positions")


def expected_parameters(kind, dim, blocks, length):
    if kind is HSTU:
        return blocks * (4 * dim**2 + dim**2 + dim + 2 * length - 1 + 33)
    if kind is FuXi:
        return blocks * (6 * dim**2 + 3 * dim**2 + dim + 3 * dim**2 + 2 * length - 1) + 3
    return blocks * 6 * (dim**2 + dim)


@pytest.mark.parametrize("size", LADDER)
@pytest.mark.parametrize("kind", [HSTU, FuXi, SASRec])
def test_a_preset_is_what_the_paper_says(kind, size):
    dim, blocks, width, length = LADDER[size]
    with torch.device("meta"):
        backbone = kind.preset(size)
    block = backbone.blocks[0]
    assert (backbone.dim, len(backbone.blocks), block.num_heads, backbone.max_length) == (dim, blocks, 8, length)
    if kind is not SASRec:
        assert (block.qk_dim, block.v_dim) == (width, width)
    assert backbone.positions.shape == (length, dim)
    assert parameters(backbone) == expected_parameters(kind, dim, blocks, length)


def test_options_win_over_a_preset():
    backbone = HSTU.preset("tiny", dropout=0.5, num_blocks=1, time=None)
    assert (backbone.dropout.p, len(backbone.blocks), backbone.blocks[0].bias.time) == (0.5, 1, None)


def test_the_buckets_of_a_preset_reach_beyond_a_month():
    """In seconds; the negative control is the public divisor."""
    month = torch.tensor([30 * 24 * 3600])
    with torch.device("meta"):
        time = HSTU.preset("tiny").blocks[0].time
    assert time.buckets(month) < time.count == 32
    assert TimeBuckets(32).buckets(month) == 32


def test_an_unknown_size_names_those_there_are():
    for kind in (HSTU, FuXi, SASRec):
        message = f"{kind.__name__}.preset: there is no size 'huge'; there are tiny, small, medium, large, long"
        with pytest.raises(ConfigurationError, match=message):
            kind.preset("huge")
