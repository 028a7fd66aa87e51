"""The times of ``klfast check --time``."""
