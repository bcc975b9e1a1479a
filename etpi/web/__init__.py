"""How `etpi ui` and `etpi view` are served: `guard` admits requests, `serve` runs an application behind it, `ui` is
Dagster's page.
"""
