"""Tiny base models: their pretrained weights, and the recipe of each. The lab trains them."""
