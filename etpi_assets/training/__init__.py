"""Supervised fine-tuning and reinforcement; the worker programs that they start are in `etpi_resources.trainers`."""
