-- How much a training rollout raised or lowered the held-out metric of experiments: its place among their rollouts, the
-- most harmful first (see the view blame_rollouts), its worst turn, and, if it is an extreme one, its part on each
-- held-out task, the lowest first.
WITH ranked AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY experiment ORDER BY harm, rollout_id) AS place,
        count(*) OVER (PARTITION BY experiment) AS n
    FROM blame_rollouts
    WHERE
        experiment IN (
            SELECT b.experiment FROM blame AS b
            WHERE b.rollout_id = getvariable('rollout')
        )
),

of_tasks AS (
    SELECT
        experiment,
        task_id,
        avg(influence) AS influence
    FROM blame_tasks
    WHERE rollout_id = getvariable('rollout')
    GROUP BY experiment, task_id
)

SELECT
    r.*,
    (
        SELECT list({ 'task_id': t.task_id, 'influence': t.influence } ORDER BY t.influence, t.task_id)
        FROM of_tasks AS t
        WHERE t.experiment = r.experiment
    ) AS tasks
FROM ranked AS r
WHERE r.rollout_id = getvariable('rollout')
ORDER BY r.experiment;
