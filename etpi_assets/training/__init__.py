"""Training recipes; the workers that run them are in `etpi_resources.trainers`."""
