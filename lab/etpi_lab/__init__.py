"""The lab: ablations on the embedded worlds, findings, sweeps and their statistics, as a plugin of etpi."""
