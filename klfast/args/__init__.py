"""The arguments of a call: what they must be (``signature``), and the one check of them."""
