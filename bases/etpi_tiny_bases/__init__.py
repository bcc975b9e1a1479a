"""Weights of etpi's tiny bases: a folder for each, with its recipe. The lab trains them (`etpi lab tiny-bases`)."""
