"""The asset graph: each stage's plain functions, and the thin Dagster assets over them."""
