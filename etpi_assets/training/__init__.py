"""Training recipes; the worker programs that they start are in `etpi_resources.trainers`."""
