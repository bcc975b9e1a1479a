-- The rows that differ between two versions of a data set (old, new): added, removed, or with another weight, copies or
-- split, a page of them with the count of each kind.
WITH old_rows AS (
    SELECT * FROM upweighted_dataset.dataset_rows_history
    WHERE version = getvariable('old')
),

new_rows AS (
    SELECT * FROM upweighted_dataset.dataset_rows_history
    WHERE version = getvariable('new')
),

compared AS (
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
            ELSE 'changed'
        END AS change
    FROM old_rows AS o
    FULL OUTER JOIN new_rows AS n ON o.pair_id = n.pair_id
    WHERE
        o.pair_id IS NULL
        OR n.pair_id IS NULL
        OR o.weight * o.copies != n.weight * n.copies
        OR o.split != n.split
        OR o.output_tokens != n.output_tokens
)

SELECT
    *,
    count(*) OVER (PARTITION BY change) AS n_of_change,
    count(*) OVER () AS matches
FROM compared
ORDER BY list_position(['removed', 'added', 'changed'], change) ASC, pair_id ASC
LIMIT getvariable('count') OFFSET getvariable('first');
