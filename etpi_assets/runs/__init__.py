"""Runs started from the command line: preflight, several experiments in parallel, progress and tables on a terminal."""
