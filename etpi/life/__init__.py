"""The console commands for a lake after the run: disk use, removal, backup, migration.

The work on files is in `etpi_resources.lake` (`usage`, `removal`, `backup`, `migrations`).
"""
