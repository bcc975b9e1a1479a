"""Train the tiny bases that etpi ships."""
