"""docs/drop_in.md's example of a patch, with the framework there."""

import readme
from verl.workers.utils import losses

import klfast


def test_patch():
    before = losses.kl_penalty
    readme.run("patch")
    assert losses.kl_penalty is not before
    klfast.compat.unpatch("verl")
    assert losses.kl_penalty is before
