"""The kernel against eager PyTorch, as `kernels benchmark` runs it."""

import torch
from kernels.benchmark import Benchmark

ON_GPU = {"tokens": (512, 8192), "logits": (1, 2048, 32000)}
ON_CPU = {"tokens": (8, 256), "logits": (1, 8, 512)}
"""Small: the kernel's reference runs there."""


def on_device(device):
    return ON_CPU if torch.device(device).type == "cpu" else ON_GPU


class KLPenalty(Benchmark):
    """k3 of log-probs under a mask, to the sums of sequences, and to a mean with its gradient."""

    seed = 0

    def setup(self):
        shape = on_device(self.device)["tokens"]
        logprobs = -3 - torch.rand(shape, device=self.device)
        self.ref_logprobs = logprobs - 0.1 * torch.randn(shape, device=self.device)
        self.logprobs = logprobs.requires_grad_()
        self.mask = torch.rand(shape, device=self.device) < 0.9

    def eager(self):
        log_ratio = self.logprobs - self.ref_logprobs
        return torch.where(self.mask, torch.exp(-log_ratio) - 1 + log_ratio, 0)

    def gradient_of(self, mean):
        return torch.autograd.grad(mean, self.logprobs)[0] * self.mask.sum()

    def benchmark_sums(self):
        with torch.no_grad():
            self.out = self.kernel.kl_penalty(
                self.logprobs, self.ref_logprobs, self.mask, reduction="seq-sum"
            )

    def verify_sums(self):
        with torch.no_grad():
            return self.eager().sum(1)

    def benchmark_gradient(self):
        mean = self.kernel.kl_penalty(
            self.logprobs, self.ref_logprobs, self.mask, reduction="token-mean"
        )
        self.out = self.gradient_of(mean)

    def verify_gradient(self):
        return self.gradient_of(self.eager().sum() / self.mask.sum())


class KLDivergence(Benchmark):
    """The reverse KL of two rows of logits, to a mean with its gradient."""

    seed = 0

    def setup(self):
        shape = on_device(self.device)["logits"]
        self.logits = torch.randn(shape, device=self.device, requires_grad=True)
        self.ref_logits = torch.randn(shape, device=self.device)

    def gradient_of(self, mean):
        return torch.autograd.grad(mean, self.logits)[0] * self.logits.shape[1]

    def benchmark_gradient(self):
        mean = self.kernel.kl_divergence(self.logits, self.ref_logits, reduction="token-mean")
        self.out = self.gradient_of(mean)

    def verify_gradient(self):
        logprobs, ref_logprobs = (t.log_softmax(-1) for t in (self.logits, self.ref_logits))
        return self.gradient_of((logprobs.exp() * (logprobs - ref_logprobs)).sum(-1).mean())
