"""Several machines that share one lake: what a user writes of them, and how etpi uses Postgres and Ray.

On one machine nothing here is imported; its packages come with `pip install "etpi[cluster]"`.
"""
