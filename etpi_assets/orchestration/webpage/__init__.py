"""Figures, links and previews of a version in Dagster's web page. No asset's code version covers this package."""
