"""Known answers and promises, checked on the machine that klfast runs on: ``klfast check``.

``cases`` has the options of each function, ``covering`` the rows of them in which any two meet,
``calls`` what runs, ``compare`` the truth and the tolerances, ``promises`` what must keep its bits,
``report`` the command.
"""
