-- What is the metric of each held-out task, in an experiment and in those trained without some of its rollouts?
-- SET VARIABLE experiment = 'name'; the others are those that `etpi blame --retrain` writes. SET VARIABLE metric for
-- another than solved. unseen: blame did not read the task, so it judges a retraining; `etpi blame` has the intervals.
WITH valued AS (
    SELECT
        r.experiment,
        r.task_id,
        CASE coalesce(getvariable('metric'), 'solved')
            WHEN 'solved' THEN (s.reward = 1)::DOUBLE
            WHEN 'reward' THEN s.reward
            WHEN 'plan_first' THEN s.plan_first::DOUBLE
            WHEN 'plan_content' THEN s.plan_content::DOUBLE
            WHEN 'follow_through' THEN s.follow_through
        END AS metric_value
    FROM rollouts AS r
    INNER JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id
    WHERE
        r.origin = 'eval'
        AND s.origin = 'eval'
        AND r.checkpoint_role = 'sft'
        AND NOT s.infrastructure_error
        AND (
            getvariable('experiment') IS NULL
            OR r.experiment = getvariable('experiment')
            OR starts_with(r.experiment, concat(getvariable('experiment'), '_without_'))
        )
)

SELECT
    experiment,
    task_id,
    task_id NOT IN (
        SELECT b.task_id FROM blame_tasks AS b
        WHERE b.experiment = coalesce(getvariable('experiment'), valued.experiment)
    ) AS unseen,
    sum(metric_value) AS total,
    count(metric_value)::INTEGER AS size
FROM valued
GROUP BY experiment, task_id
HAVING count(metric_value) > 0
ORDER BY experiment, task_id;
