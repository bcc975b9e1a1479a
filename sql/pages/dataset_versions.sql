-- The versions of an experiment's data set that the lake still has, the current one first, then the newest, with their
-- size. A blocked version failed a check, so nothing downstream reads it.
WITH sizes AS (
    SELECT
        version,
        count(*) AS n_rows,
        count(*) FILTER (split = 'train') AS train_rows,
        count(DISTINCT rollout_id) AS rollouts,
        sum(output_tokens)::BIGINT AS output_tokens,
        sum(weight * copies * output_tokens) AS loss_weight
    FROM upweighted_dataset.dataset_rows_history
    WHERE
        version IN (
            SELECT m.version FROM manifests AS m
            WHERE m.asset = 'upweighted_dataset' AND m.key = getvariable('experiment')
        )
    GROUP BY version
),

published AS (
    SELECT
        version,
        max(created_at) AS created_at,
        bool_or(state = 'current') AS is_current,
        bool_and(state = 'blocked') AS is_blocked
    FROM manifests
    WHERE asset = 'upweighted_dataset' AND key = getvariable('experiment')
    GROUP BY version
)

SELECT
    p.version,
    p.created_at,
    p.is_current,
    p.is_blocked,
    s.n_rows,
    s.train_rows,
    s.rollouts,
    s.output_tokens,
    s.loss_weight
FROM published AS p
LEFT JOIN sizes AS s ON p.version = s.version
ORDER BY p.is_current DESC, p.created_at DESC;
