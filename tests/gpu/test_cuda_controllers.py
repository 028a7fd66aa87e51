"""Controllers on a GPU: a CUDA graph of the fused loss reads what they fill."""

import random
import warnings

import gpu
import pytest
import torch
from gpu import capture
from kinds import STEERING, make

import klfast

pytestmark = gpu.marks

every_kind = pytest.mark.parametrize("kind", STEERING)
OPTIONS = {"dead_band": 0.02, "ema": 0.5, "floor": 0.05, "max_coef": 3.0}


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
@every_kind
def test_a_captured_step_reads_the_coefficient_that_an_update_filled(kind, options):
    options = {**options, "unit": "sequence"}
    host, device = make(kind, 0.5, 6.0, **options), make(kind, 0.5, 6.0, device="cuda", **options)
    value = device.value
    logprobs = -torch.rand(8, 64, device="cuda")
    logprobs.requires_grad_()
    ref_logprobs = -torch.rand(8, 64, device="cuda")

    def step():
        loss, stats = klfast.kl_penalty(
            logprobs, ref_logprobs, reduction="seq-mean-token-sum", coef=device, return_stats=True
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return loss.detach(), gradient, stats

    graph, (loss, gradient, stats) = capture(step)
    moved = set()
    for _ in range(40):
        with torch.no_grad():
            logprobs.copy_(-torch.rand(8, 64, device="cuda") * random.uniform(0.5, 2))
        expected = klfast.kl_penalty(
            logprobs, ref_logprobs, reduction="seq-mean-token-sum", coef=host.value
        )
        graph.replay()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert gradient.isfinite().all()
        host.update(stats)
        assert device.update(stats) is value
        assert value.item() == host.value
        moved.add(host.value)
    assert len(moved) > 2


@pytest.mark.sanitizer
def test_a_coefficient_on_the_gpu_reaches_the_kernels_and_is_moved_by_their_statistics():
    controller = klfast.NuPIKLController(0.5, 6.0, device="cuda")
    logprobs, ref_logprobs = -torch.rand(2, 4, 9, device="cuda")
    for _ in range(2):
        loss, stats = klfast.kl_penalty(
            logprobs.requires_grad_(),
            ref_logprobs,
            reduction="seq-mean-token-sum",
            coef=controller.value,
            return_stats=True,
        )
        loss.backward()
        controller.update(stats)
    assert 0 < controller.value.item() < 0.5


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_profile_waits_for_nothing_and_replays_as_a_graph(packed):
    shape = (96,) if packed else (4, 24)
    logprobs, ref_logprobs = -torch.rand(2, *shape, device="cuda")
    mask = torch.rand(shape, device="cuda") < 0.8
    cu_seqlens = torch.arange(0, 97, 24, device="cuda") if packed else None

    def look():
        return klfast.log_ratio_profile(logprobs, ref_logprobs, mask, cu_seqlens=cu_seqlens)

    with gpu.no_sync():
        look()
    graph, profile = capture(look)
    logprobs.uniform_(-3, 0)
    graph.replay()
    expected = klfast.log_ratio_profile(
        logprobs.cpu(),
        ref_logprobs.cpu(),
        mask.cpu(),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.cpu(),
    )
    for name in ("quantiles", "tokens", "k1", "k3"):
        torch.testing.assert_close(getattr(profile, name).cpu(), getattr(expected, name))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_an_object_for_a_run_waits_once_a_step(device):
    penalty = klfast.KLPenalty(controller=klfast.NuPIKLController(0.5, 6.0, device=device))
    on_cpu = klfast.KLPenalty(controller=klfast.NuPIKLController(0.5, 6.0))
    logprobs = -torch.rand(8, 64, device="cuda")
    logprobs.requires_grad_()
    for _ in range(3):
        with gpu.no_sync():
            for part in logprobs.split(3):
                penalty(part, part.detach() - 1.0).backward()
        on_cpu(logprobs.detach().cpu(), logprobs.detach().cpu() - 1.0)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                numbers = penalty.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(waits) == 1
        assert numbers == pytest.approx(on_cpu.step(), rel=1e-5)
