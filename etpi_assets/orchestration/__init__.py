"""etpi as Dagster sees it: assets, jobs, partitions, a schedule, and the content of the web page."""
