"""Repeat experiments over training seeds, in shares and with a page of progress: `etpi lab results`, `sweeps`."""
