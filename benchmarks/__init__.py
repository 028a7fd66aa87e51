"""How fast klfast is, and what its kernels cost: programs over the library, run from a checkout."""
