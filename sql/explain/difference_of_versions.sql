-- The rows that were added, removed or changed between two versions of a table. Reads old_keyed and new_keyed:
-- (row_key, cells: a list of the other columns as text), which `etpi explain` creates from two versions. Rows with the
-- same key are paired in the order of their content.
WITH old_numbered AS (
    SELECT
        row_key,
        cells,
        row_number() OVER (PARTITION BY row_key ORDER BY cells) AS copy
    FROM old_keyed
),

new_numbered AS (
    SELECT
        row_key,
        cells,
        row_number() OVER (PARTITION BY row_key ORDER BY cells) AS copy
    FROM new_keyed
)

SELECT
    coalesce(n.row_key, o.row_key) AS row_key,
    o.cells AS old_cells,
    n.cells AS new_cells
FROM old_numbered AS o
FULL OUTER JOIN new_numbered AS n ON o.row_key = n.row_key AND o.copy = n.copy
WHERE o.row_key IS NULL OR n.row_key IS NULL OR o.cells IS DISTINCT FROM n.cells
ORDER BY row_key;
