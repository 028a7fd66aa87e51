"""The readable specification in float64, on any device."""
