"""From logits over the whole vocabulary: token log-probs, entropy, exact divergences.

Data flows as for log-probs: ``api`` -> ``call`` -> ``klfast.backends`` -> ``ops`` -> kernel
-> ``csrc/formulas/divergences.h``. A kernel knows rows of V logits alone. What a mask, a layout or
a reduction makes of the rows' numbers is said by the kernels over log-probs, which read one number
a row.
"""
