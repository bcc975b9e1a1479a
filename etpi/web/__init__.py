"""The servers of `etpi ui` and `etpi view`: `guard` admits requests, `serve` runs an application behind it, `ui` is
Dagster's page.
"""
