"""Liger's fused linear JSD with its Triton kernels in Triton's interpreter, on stored inputs.

``TRITON_INTERPRET=1 python interpreted_jsd.py INPUTS OUTPUTS``
"""

import sys

import torch
import triton_interpreter  # noqa: F401  # which mends it
from liger_kernel.transformers import LigerFusedLinearJSD
from liger_kernel.transformers.functional import liger_fused_linear_jsd


def run(tensors, labels, upstream, is_module, **options):
    """The loss, and the gradients of the student's hidden states and head."""
    given = [t.requires_grad_(i < 2) for i, t in enumerate(tensors)]
    if is_module:
        loss = LigerFusedLinearJSD(**options)(*given, labels)
    else:
        loss = liger_fused_linear_jsd(*given, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss * upstream, given[:2])]


if __name__ == "__main__":
    calls = torch.load(sys.argv[1])
    torch.save([run(**call) for call in calls], sys.argv[2])
