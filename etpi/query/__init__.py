"""`etpi sql`: questions to the catalog, as reports of sql/reports, files or text, and DuckDB's own shell."""
