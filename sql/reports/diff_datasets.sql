-- Which training rows differ between two versions of an experiment's data set?
-- SET VARIABLE experiment = 'name'; the default is the first experiment with two versions.
-- SET VARIABLE old = 'version'; SET VARIABLE new = 'version'; the defaults are the current version and the last one
-- before it. Rows are paired by pair, which names rollout, agent and turn. change is removed, added or changed.
SET VARIABLE asked = coalesce(
    getvariable('experiment'),
    (
        SELECT v.experiment FROM dataset_history AS v
        GROUP BY v.experiment
        HAVING count(DISTINCT v.version) > 1
        ORDER BY v.experiment
        LIMIT 1
    )
);

WITH numbered AS (
    SELECT
        version,
        row_number() OVER (ORDER BY bool_or(is_current) DESC, max(created_at) DESC) AS age
    FROM dataset_history
    WHERE experiment = getvariable('asked')
    GROUP BY version
),

old_rows AS (
    SELECT h.*
    FROM dataset_history AS h
    INNER JOIN numbered AS n ON h.version = n.version
    WHERE
        h.experiment = getvariable('asked')
        AND CASE WHEN getvariable('old') IS NULL THEN n.age = 2 ELSE n.version = getvariable('old') END
),

new_rows AS (
    SELECT h.*
    FROM dataset_history AS h
    INNER JOIN numbered AS n ON h.version = n.version
    WHERE
        h.experiment = getvariable('asked')
        AND CASE WHEN getvariable('new') IS NULL THEN n.age = 1 ELSE n.version = getvariable('new') END
)

SELECT
    getvariable('asked') AS experiment,
    CASE
        WHEN n.pair_id IS NULL THEN 'removed'
        WHEN o.pair_id IS NULL THEN 'added'
        ELSE 'changed'
    END AS change,
    coalesce(n.pair_id, o.pair_id) AS pair_id,
    coalesce(n.rollout_id, o.rollout_id) AS rollout_id,
    coalesce(n.agent_id, o.agent_id) AS agent_id,
    coalesce(n.turn, o.turn) AS turn,
    coalesce(n.task_id, o.task_id) AS task_id,
    coalesce(n.teacher, o.teacher) AS teacher,
    o.split AS old_split,
    n.split AS new_split,
    o.weight * o.copies AS old_weight,
    n.weight * n.copies AS new_weight,
    o.output_tokens AS old_output_tokens,
    n.output_tokens AS new_output_tokens
FROM old_rows AS o
FULL OUTER JOIN new_rows AS n ON o.pair_id = n.pair_id
WHERE
    -- A version without a second one to compare with differs in nothing.
    (SELECT count(*) FROM old_rows) > 0
    AND (
        o.pair_id IS NULL
        OR n.pair_id IS NULL
        OR o.split != n.split
        OR o.weight * o.copies != n.weight * n.copies
        OR o.output_tokens != n.output_tokens
        OR o.dataset_row_id != n.dataset_row_id
    )
ORDER BY change DESC, pair_id ASC;
