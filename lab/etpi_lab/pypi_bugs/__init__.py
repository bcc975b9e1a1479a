"""The family `pypi_bugs`, and its rows: mutations of real packages that break a test."""
