"""`python -m etpi.reference`: rewrite every generated page of docs/, from the root of a checkout."""

from etpi.reference.pages import write_pages

write_pages()
