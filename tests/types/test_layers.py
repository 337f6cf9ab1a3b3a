"""Every layer of every family is well typed on every layout, up to thousands of ranks: no gradient is forgotten or
counted twice, and what each segment says about its outputs is true."""

from __future__ import annotations

import pytest
import spmd_types as spmd

from tests.types.checker import (
    FAMILIES,
    check_segments,
    checking,
    data_groups,
    fake_mesh,
    fsdp_passes_types,
    new_inputs,
    new_model,
    vocab_parallel_loss,
)

pytestmark = pytest.mark.apart

MESHES = {
    "tp8": dict(tp=8),
    "dp2-tp4": dict(dp_replicate=2, tp=4),
    "fsdp64": dict(dp_shard=64),
    "fsdp16-tp8": dict(dp_shard=16, tp=8),
    "hsdp2x4-tp8": dict(dp_replicate=2, dp_shard=4, tp=8),
    "dp8-cp4": dict(dp_replicate=8, cp=4),
    "dp8-cp2-tp4": dict(dp_replicate=8, cp=2, tp=4),
    "dp8-cp4-ulysses-tp2": dict(dp_replicate=8, cp=4, ulysses=4, tp=2),
    "hsdp16x16-tp8": dict(dp_replicate=16, dp_shard=16, tp=8),
}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["tp8", "dp8-cp2-tp4", "dp8-cp4-ulysses-tp2", "hsdp16x16-tp8"])
def test_every_segment_has_the_layout_it_names(layout: str, family: str, sequence_parallel: bool) -> None:
    with fake_mesh(**MESHES[layout]) as mesh:
        model = new_model(mesh, FAMILIES[family], fsdp=False)
        with checking(mesh):
            _, x, context = new_inputs(mesh, model, sequence_parallel=sequence_parallel)
            check_segments(mesh, model, x, context)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", MESHES)
def test_loss_is_complete_over_tp_and_partial_over_data(layout: str, family: str) -> None:
    """The whole model, under FSDP2 where the layout shards: I on tp (counted once), V on data axes (summed later)."""
    with fsdp_passes_types(), fake_mesh(**MESHES[layout]) as mesh:
        model = new_model(mesh, FAMILIES[family], fsdp=mesh.dp_shard.size > 1)
        with checking(mesh):
            for sequence_parallel in (False, True) if mesh.tp.size > 1 else (False,):
                tokens, _, context = new_inputs(mesh, model, sequence_parallel=sequence_parallel)
                loss = model(tokens, context, tokens, vocab_parallel_loss(mesh))
                expected = {group: spmd.V for group in data_groups(mesh)}
                if mesh.tp.size > 1:
                    expected[mesh.tp.group] = spmd.I
                spmd.assert_type(loss, expected)
                for group in data_groups(mesh):
                    loss = spmd.reinterpret(loss, group, src=spmd.V, dst=spmd.P)
                loss.backward()
