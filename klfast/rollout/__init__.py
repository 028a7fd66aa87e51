"""Between the sampler and the trainer: importance weights, rejection and drift.

``api`` has the public function, ``rejection`` a rule, ``stats`` the statistics, ``call`` the call
object, ``formulas`` the statistics of a token, ``presets`` the choices of papers and frameworks.
"""

from klfast.rollout import presets as presets
