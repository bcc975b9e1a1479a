"""What repeated experiments show: findings, sweeps, the page of results, intervals over seeds, power."""
