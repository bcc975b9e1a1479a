-- How much a training rollout raised or lowered the held-out metric of experiments: its place among their rollouts, the
-- most harmful first (see the report blame_rollouts), its worst turn, and, if it is an extreme one, its part on each
-- held-out task, the lowest first.
WITH of_turns AS (
    SELECT
        experiment,
        objective,
        rollout_id,
        agent_id,
        turn,
        sum(influence) / count(DISTINCT concat(seed, '/', step)) AS influence,
        sum(harm) / count(DISTINCT concat(seed, '/', step)) AS harm
    FROM blame
    WHERE
        experiment IN (
            SELECT b.experiment FROM blame AS b
            WHERE b.rollout_id = getvariable('rollout')
        )
    GROUP BY experiment, objective, rollout_id, agent_id, turn
),

ranked AS (
    SELECT
        experiment,
        objective,
        rollout_id,
        sum(influence) AS influence,
        arg_min(agent_id, influence) AS worst_agent,
        arg_min(turn, influence) AS worst_turn,
        min(influence) AS worst_influence,
        row_number() OVER (PARTITION BY experiment ORDER BY sum(harm), rollout_id) AS place,
        count(*) OVER (PARTITION BY experiment) AS n
    FROM of_turns
    GROUP BY experiment, objective, rollout_id
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
