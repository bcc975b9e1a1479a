"""Plan-first conversations from a template: which files a plan names, what is said, and the loop that plays it."""
