"""Collectives that give every rank the same bits."""
