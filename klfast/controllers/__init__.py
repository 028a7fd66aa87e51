"""Controllers of the KL coefficient, and the monitor."""
