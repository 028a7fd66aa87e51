"""Numbers as people read them."""

from __future__ import annotations


def number(value: float) -> str:
    """Three significant digits, without an exponent where people read numbers."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"
