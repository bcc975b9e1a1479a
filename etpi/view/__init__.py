"""`etpi view`: web pages over the catalog, which show rollouts, tokens, data sets and running work. Read-only.

`app` has the routes and their protection, `catalog_file` runs the queries of `sql/pages`, a module of `pages` computes
the values of one kind of page, and `templates` lays them out.
"""
