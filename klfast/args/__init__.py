"""The arguments of a call: the table of their shapes (``signature``), and their only check."""
