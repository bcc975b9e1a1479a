"""Build the rows of the suite `pypi_bugs`: mutations of real packages that break a test."""
