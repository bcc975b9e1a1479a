-- Which training tasks are worth reinforcing on: solved in some attempts, and some that no attempt solved?
-- Tasks of a training split with at least `attempts` graded attempts (4), of any model and experiment: those that all
-- attempts solved are left out; of those that none solved, the share `unsolved` (0.25) of the mixed ones is added.
-- SET VARIABLE suite = 'name'; SET VARIABLE model = 'sft' (a checkpoint role or teacher) for one model's attempts.
-- `rl.tasks_from = "mixed_tasks"` trains on them.
WITH attempts AS (
    SELECT
        r.task_id,
        count(*) AS attempts,
        avg(((r.outcome ->> '$.reward')::DOUBLE = 1)::INT) AS solved
    FROM rollouts AS r
    INNER JOIN tasks AS t ON r.suite = t.suite AND r.task_id = t.task_id
    WHERE
        t.split = 'train'
        AND (r.outcome ->> '$.reward') IS NOT NULL
        AND (getvariable('suite') IS NULL OR r.suite = getvariable('suite'))
        AND (getvariable('model') IS NULL OR r.model = getvariable('model'))
    GROUP BY r.task_id
    HAVING count(*) >= coalesce(getvariable('attempts'), 4)
),

ranked AS (
    SELECT
        *,
        solved > 0 AS mixed,
        -- hash: an order that neither names nor repositories decide
        row_number() OVER (PARTITION BY solved = 0 ORDER BY hash(task_id), task_id) AS place,
        count(*) FILTER (WHERE solved > 0) OVER () AS mixed_tasks
    FROM attempts
    WHERE solved < 1
)

SELECT
    task_id,
    attempts,
    round(solved, 3) AS solved
FROM ranked
WHERE mixed OR place <= ceil(coalesce(getvariable('unsolved'), 0.25) * mixed_tasks)
ORDER BY mixed DESC, place ASC;
