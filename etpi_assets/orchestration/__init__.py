"""etpi as Dagster sees it: assets, jobs, partitions, automation, and what the web page shows."""
