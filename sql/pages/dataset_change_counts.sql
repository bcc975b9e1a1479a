-- How many rows two versions of a data set (old, new) share, and how many were added, removed or changed.
WITH compared AS (
    SELECT
        CASE
            WHEN o.pair_id IS NULL THEN 'added'
            WHEN n.pair_id IS NULL THEN 'removed'
            WHEN
                o.weight * o.copies != n.weight * n.copies
                OR o.split != n.split
                OR o.output_tokens != n.output_tokens
                THEN 'changed'
            ELSE 'equal'
        END AS change
    FROM (
        SELECT * FROM upweighted_dataset.dataset_rows_history
        WHERE version = getvariable('old')
    ) AS o
    FULL OUTER JOIN (
        SELECT * FROM upweighted_dataset.dataset_rows_history
        WHERE version = getvariable('new')
    ) AS n ON o.pair_id = n.pair_id
)

SELECT
    change,
    count(*) AS n
FROM compared
GROUP BY change
ORDER BY list_position(['removed', 'added', 'changed', 'equal'], change);
