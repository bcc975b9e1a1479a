"""How `etpi ui` and `etpi view` are served: `guard` admits requests, `serve` runs a guarded application, `ui` is Dagster's page."""
