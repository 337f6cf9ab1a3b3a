"""Dropout masks belong to samples, not to ranks."""

from __future__ import annotations

import torch

from sennit.mesh import Axis
from sennit.nn import DropoutKey
from sennit.nn.dropout import dropout, dropout_mask

KEY = DropoutKey(7, (3, 11))
WHOLE = torch.Size((2, 8, 64))
ONE = Axis("tp")


def axis(rank: int) -> Axis:
    return Axis("tp", 2, rank)


def test_sequence_shards_take_their_part_of_one_mask() -> None:
    whole = dropout_mask(KEY, "0/attention", WHOLE, 0.5, ONE, sharded=False)
    parts = [dropout_mask(KEY, "0/attention", torch.Size((2, 4, 64)), 0.5, axis(r), sharded=True) for r in (0, 1)]
    assert torch.equal(torch.cat(parts, 1), whole)
    for rank in (0, 1):
        assert torch.equal(dropout_mask(KEY, "0/attention", WHOLE, 0.5, axis(rank), sharded=False), whole)


def test_masks_differ_by_sample_site_and_seed_and_follow_the_sample() -> None:
    whole = dropout_mask(KEY, "0/attention", WHOLE, 0.5, ONE, sharded=False)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, dropout_mask(KEY, "0/mlp", WHOLE, 0.5, ONE, sharded=False))
    assert not torch.equal(whole, dropout_mask(DropoutKey(8, (3, 11)), "0/attention", WHOLE, 0.5, ONE, sharded=False))
    turned = dropout_mask(DropoutKey(7, (11, 3)), "0/attention", WHOLE, 0.5, ONE, sharded=False)
    assert torch.equal(turned, whole.flip(0))


def test_kept_elements_are_scaled_and_the_mean_stays() -> None:
    x = torch.ones(2, 64, 64, dtype=torch.float64)
    out = dropout(x, KEY, "0/mlp", 0.25, ONE, sharded=False)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float(out.mean()) - 1.0) < 0.05


def test_drawing_a_mask_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    dropout_mask(KEY, "0/mlp", WHOLE, 0.5, ONE, sharded=False)
    assert torch.equal(torch.get_rng_state(), before)
