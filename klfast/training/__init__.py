"""Objects for a training loop."""
