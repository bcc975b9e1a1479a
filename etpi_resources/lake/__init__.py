"""The lake: versioned parquet tables, their schemas, manifests and checks, and the DuckDB catalog over them."""
