"""etpi as Dagster sees it: assets, jobs, partitions, automation, and the content of the web page."""
