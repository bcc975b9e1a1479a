-- The rows that differ between two versions of a data set (old, new): added, removed, or with another weight, copies,
-- split or number of tokens. A page of them, with the count of each kind; without any, one row of counts alone.
WITH old_rows AS (
    SELECT * FROM upweighted_dataset.dataset_rows_history
    WHERE version = getvariable('old')
),

new_rows AS (
    SELECT * FROM upweighted_dataset.dataset_rows_history
    WHERE version = getvariable('new')
),

compared AS MATERIALIZED (
    SELECT
        coalesce(n.pair_id, o.pair_id) AS pair_id,
        coalesce(n.rollout_id, o.rollout_id) AS rollout_id,
        coalesce(n.agent_id, o.agent_id) AS agent_id,
        coalesce(n.turn, o.turn) AS turn,
        coalesce(n.task_id, o.task_id) AS task_id,
        o.weight * o.copies AS old_weight,
        n.weight * n.copies AS new_weight,
        o.split AS old_split,
        n.split AS new_split,
        o.output_tokens AS old_tokens,
        n.output_tokens AS new_tokens,
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
    FROM old_rows AS o
    FULL OUTER JOIN new_rows AS n ON o.pair_id = n.pair_id
),

counts AS (
    SELECT
        count(*) FILTER (change = 'removed') AS n_removed,
        count(*) FILTER (change = 'added') AS n_added,
        count(*) FILTER (change = 'changed') AS n_changed,
        count(*) FILTER (change = 'equal') AS n_equal
    FROM compared
),

page AS (
    SELECT *
    FROM compared
    WHERE change != 'equal'
    ORDER BY list_position(['removed', 'added', 'changed'], change) ASC, pair_id ASC
    LIMIT getvariable('count') OFFSET getvariable('first')
)

SELECT
    c.*,
    p.*
FROM counts AS c
LEFT JOIN page AS p ON TRUE
ORDER BY list_position(['removed', 'added', 'changed'], p.change) ASC, p.pair_id ASC;
