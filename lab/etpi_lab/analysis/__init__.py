"""The analysis of repeated experiments: findings, sweeps, the page of results, intervals over seeds, power."""
