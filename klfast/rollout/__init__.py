"""Between the sampler and the trainer: importance weights, rejection and drift.

``api`` has the public function, ``rejection`` a rule, ``stats`` the statistics, ``call`` the call
object, ``formulas`` what is computed of a token.
"""
