"""Processes: supervision of children, locks between processes, progress of long work."""
