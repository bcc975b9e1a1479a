"""Trainers: starting a worker in its own interpreter, and the workers."""
