# /// script
# requires-python = ">=3.10"
# dependencies = ["kernels", "torch>=2.10"]
# ///
"""A KL penalty with its gradient, from the kernel in `build/` here. Run `python example.py`."""

from pathlib import Path

import torch
from kernels import get_local_kernel

klfast = get_local_kernel(Path(__file__).resolve().parent)

device = "cuda" if torch.cuda.is_available() else "cpu"
logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -4.0]], device=device, requires_grad=True)
ref_logprobs = torch.tensor([[-1.2, -1.9, -0.4], [-0.3, -2.0, -4.0]], device=device)
mask = torch.tensor([[True, True, True], [True, True, False]], device=device)

loss, stats = klfast.kl_penalty(
    logprobs, ref_logprobs, mask, estimator="k3+", reduction="token-mean", return_stats=True
)
loss.backward()
print(f"KL {loss.item():.6f} nats per token")
print(f"gradient {logprobs.grad.tolist()}")
print(stats)
