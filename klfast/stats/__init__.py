"""The statistics that users read."""
