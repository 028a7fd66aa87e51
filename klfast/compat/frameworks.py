"""The frameworks that ``klfast.compat`` has the KL code of: a row each.

``patch``, the pages of the site and the tests read this table. CONTRIBUTING.md's recipe for a
framework says which files belong to a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework; its functions are in ``klfast/compat/<name>.py``.

    Attributes:
        title: its name as its authors write it.
        package: its own top-level package, which must be installed for a patch.
        releases: those whose code was read. Those with a v are git tags.
        kl_modules: the modules that a worker of Ray imports before it computes a KL.
    """

    title: str
    package: str
    releases: str
    kl_modules: tuple[str, ...] = ()


FRAMEWORKS = {
    "trlx": Framework("trlx", "trlx", "v0.6.0, v0.7.0, main"),
    "trl": Framework("TRL", "trl", "1.10 to 1.16, 0.6 to 0.11 (PPO)"),
    "verl": Framework(
        "verl",
        "verl",
        "0.6 to 0.9, main",
        ("verl.trainer.ppo.core_algos", "verl.utils.torch_functional"),
    ),
    "openrlhf": Framework(
        "OpenRLHF", "openrlhf", "0.10 to 0.11.2, main", ("openrlhf.models.utils",)
    ),
    "roll": Framework("ROLL", "roll", "v0.1.0 to v0.3.0, main", ("roll.utils.functionals",)),
    "skyrl": Framework(
        "SkyRL", "skyrl", "0.1 to 0.3, main", ("skyrl.backends.skyrl_train.utils.ppo_utils",)
    ),
    "ms_swift": Framework("ms-swift", "swift", "4.3 to 4.6, main"),
}
"""By the name of its module in ``klfast.compat``."""
