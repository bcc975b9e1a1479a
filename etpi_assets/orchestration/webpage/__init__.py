"""What Dagster's web page shows of a version: figures, links, previews. No asset's code version covers this package."""
