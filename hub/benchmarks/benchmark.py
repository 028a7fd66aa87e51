"""The kernel against eager PyTorch, as `kernels benchmark` runs it."""

import torch
from kernels.benchmark import Benchmark

ON_GPU = {"tokens": (512, 8192), "logits": (1, 2048, 32000)}
ON_CPU = {"tokens": (8, 256), "logits": (1, 8, 512)}
"""Small shapes, because on a CPU the kernel's reference runs."""


def on_device(device):
    return ON_CPU if torch.device(device).type == "cpu" else ON_GPU


class KLPenalty(Benchmark):
    """k3 of log-probs with a mask: sums per sequence, and one sum with its gradient."""

    seed = 0

    def setup(self):
        shape = on_device(self.device)["tokens"]
        logprobs = -3 - torch.rand(shape, device=self.device)
        self.ref_logprobs = logprobs - 0.1 * torch.randn(shape, device=self.device)
        self.logprobs = logprobs.requires_grad_()
        self.mask = torch.rand(shape, device=self.device) < 0.9

    def kl(self, reduction):
        inputs = (self.logprobs, self.ref_logprobs, self.mask)
        return self.kernel.kl_penalty(*inputs, reduction=reduction)

    def eager(self):
        log_ratio = self.logprobs - self.ref_logprobs
        return torch.where(self.mask, torch.exp(-log_ratio) - 1 + log_ratio, 0)

    def benchmark_sums(self):
        with torch.no_grad():
            self.out = self.kl("seq-sum")

    def verify_sums(self):
        with torch.no_grad():
            return self.eager().sum(1)

    def benchmark_gradient(self):
        (self.out,) = torch.autograd.grad(self.kl("token-sum"), self.logprobs)

    def verify_gradient(self):
        return torch.autograd.grad(self.eager().sum(), self.logprobs)[0]


class KLDivergence(Benchmark):
    """The reverse KL of logits: a sum with its gradient."""

    seed = 0

    def setup(self):
        shape = on_device(self.device)["logits"]
        self.logits = torch.randn(shape, device=self.device, requires_grad=True)
        self.ref_logits = torch.randn(shape, device=self.device)
        self.scale = shape[-1]  # else gradients are smaller than the tolerance of `kernels`

    def benchmark_gradient(self):
        total = self.kernel.kl_divergence(
            self.logits, self.ref_logits, reduction="token-sum", coef=self.scale
        )
        (self.out,) = torch.autograd.grad(total, self.logits)

    def verify_gradient(self):
        logprobs, ref_logprobs = (t.log_softmax(-1) for t in (self.logits, self.ref_logits))
        total = self.scale * (logprobs.exp() * (logprobs - ref_logprobs)).sum()
        return torch.autograd.grad(total, self.logits)[0]
