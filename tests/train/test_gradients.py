"""Accumulation and reduction of gradients, in one process. Layouts are compared in tests/parity."""

from __future__ import annotations

import torch
from torch import nn

from sennit.mesh import Axis, Mesh
from sennit.train.gradients import GradientGroup, GradientReducer, gradient_norm


def new_reducer(parameters: list[nn.Parameter], **options: int) -> GradientReducer:
    group = GradientGroup([(index, [parameter]) for index, parameter in enumerate(parameters)], Axis("data"))
    return GradientReducer(parameters, [group], **options)


def test_bf16_gradients_are_summed_in_float32() -> None:
    """1024 microbatches that each add 1e-3 to a gradient give 1.024, not the 0.5 at which a bf16 sum stops. I-18."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    reducer = new_reducer([weight])
    reducer.begin(1024)
    for index in range(1024):
        reducer.microbatch(last=index == 1023)
        (weight * 1e-3).sum().backward()
    (total,) = reducer.collect()
    assert total.dtype == torch.float32
    each = float(torch.tensor(1e-3, dtype=torch.bfloat16))
    torch.testing.assert_close(total, torch.full((4,), 1024 * each), rtol=1e-5, atol=0)


def test_float64_gradients_stay_float64() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    reducer = new_reducer([weight])
    reducer.begin(2)
    for last in (False, True):
        reducer.microbatch(last=last)
        (weight * 0.1).sum().backward()
    (total,) = reducer.collect()
    assert total.dtype == torch.float64
    assert torch.equal(total, torch.full((3,), 0.1, dtype=torch.float64) * 2)


def test_a_single_microbatch_is_not_copied() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    reducer = new_reducer([weight])
    reducer.begin(1)
    reducer.microbatch(last=True)
    weight.sum().backward()
    (total,) = reducer.collect()
    assert weight.grad is not None and total.data_ptr() == weight.grad.data_ptr()


def test_a_parameter_without_part_in_the_loss_has_zero_gradient_and_steps_do_not_mix() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    reducer = new_reducer([used, unused])
    for microbatches in (2, 1):
        reducer.begin(microbatches)
        for index in range(microbatches):
            reducer.microbatch(last=index + 1 == microbatches)
            used.sum().backward()
        totals = reducer.collect()
        assert torch.equal(totals[0], torch.full((3,), float(microbatches)))
        assert torch.equal(totals[1], torch.zeros(2, 2))


def test_a_parameter_used_twice_is_ready_once() -> None:
    """Tied embeddings: both uses add up in the gradient."""
    weight = nn.Parameter(torch.ones(2))
    reducer = new_reducer([weight])
    reducer.begin(2)
    for last in (False, True):
        reducer.microbatch(last=last)
        (weight.sum() + 3 * weight.sum()).backward()
    assert torch.equal(reducer.collect()[0], torch.full((2,), 8.0))


def test_buckets_cover_every_parameter_once_in_reverse_order() -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in (5, 1, 7, 3, 2)]
    reducer = new_reducer(parameters, bucket_bytes=16)
    members = [bucket.members for bucket in reducer._buckets]
    assert [index for bucket in members for index in bucket] == [4, 3, 2, 1, 0]
    assert len(members) > 1


def test_norm_of_one_process_is_the_plain_norm() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    assert gradient_norm(parameters, gradients, Mesh()) == 4.0
