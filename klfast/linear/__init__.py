"""From hidden states: token log-probs, entropy, exact divergences, without the logits of a batch.

The logits of a chunk of the batch are made, read by the kernels over logits, and forgotten. ``api``
has the public functions, ``call`` the call object, ``products`` the three products and their
dtypes, ``models`` what a model makes of a chunk and what flows back to it, ``chunks`` the chunks,
``rows`` the kernels on a chunk's logits, ``autograd`` the Functions over all of it.
"""
