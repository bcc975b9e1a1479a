"""Suite families: one module each, which loads tasks, validates them and judges the agents' workspaces."""
