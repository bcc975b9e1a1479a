"""What the console command does: preflight, parallel runs, progress and tables, accepting and explaining versions."""
