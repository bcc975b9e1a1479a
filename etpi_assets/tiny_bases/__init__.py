"""Tiny base models: the recipe that pretrains one on a world's corpus, and the pretrained weights in the package."""
