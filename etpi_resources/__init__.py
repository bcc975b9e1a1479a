"""Things etpi works with: the lake, engines, sandboxes, chat formats, trainers. Never imports `etpi_assets`."""
