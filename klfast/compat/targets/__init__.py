"""What ``patch`` replaces in each framework: a file per framework, each with its ``TARGETS``.

A fingerprint is ``fingerprints.fingerprint`` of code that klfast was proved equal to. The releases
beside it are those whose code was read; ``patch`` goes by the code alone.
"""

from __future__ import annotations

from klfast.compat.patching.sites import Target
from klfast.compat.targets import (
    areal,
    ms_swift,
    nemo_rl,
    open_instruct,
    openrlhf,
    roll,
    skyrl,
    slime,
    trl,
    trlx,
    verl,
)

TARGETS: dict[str, tuple[Target, ...]] = {
    "areal": areal.TARGETS,
    "ms_swift": ms_swift.TARGETS,
    "nemo_rl": nemo_rl.TARGETS,
    "open_instruct": open_instruct.TARGETS,
    "openrlhf": openrlhf.TARGETS,
    "roll": roll.TARGETS,
    "skyrl": skyrl.TARGETS,
    "slime": slime.TARGETS,
    "trl": trl.TARGETS,
    "trlx": trlx.TARGETS,
    "verl": verl.TARGETS,
}
"""By framework; of several targets the first of which something is known in what is installed."""
