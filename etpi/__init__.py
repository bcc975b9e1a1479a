"""The console command. Its work is done in `etpi_assets` and `etpi_resources`."""
