"""The first stage: resolved specs as rows. Their models and the reading of files are in `specs`."""
