"""etpi for people: the console command. Everything it does is in `etpi_assets` and `etpi_resources`."""
