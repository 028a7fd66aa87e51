"""Known answers and guarantees, checked on the machine that klfast runs on: ``klfast check``.

``calls`` runs a call of a public function, ``cases`` makes the calls, ``compare`` has the truth and
the tolerances, ``promises`` what must keep its bits, ``report`` the command.
"""
