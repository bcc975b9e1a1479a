"""Tiny base models: the recipe that pretrains one on a world's corpus, and the trained weights that come with etpi."""
