-- Which share of the tasks do an earlier and a later checkpoint solve, paired by task, and how much do they think?
-- SET VARIABLE experiment = 'name' for one experiment. The difference is the mean over held-out tasks, each averaged
-- over its seeds, with a normal 95 % interval from the differences of the tasks. think_ratio is think tokens per turn,
-- before / after.
WITH thought AS (
    SELECT
        experiment,
        rollout_id,
        sum(think_tokens) AS think_tokens,
        sum(turns) AS turns
    FROM agent_scores
    WHERE origin = 'eval'
    GROUP BY experiment, rollout_id
),

judged AS (
    SELECT
        r.experiment,
        r.decoding,
        r.task_id,
        r.checkpoint_role,
        list_position(['base', 'sft', 'rl'], r.checkpoint_role) AS place,
        avg((s.reward = 1)::INTEGER) AS solved,
        sum(t.think_tokens) AS think_tokens,
        sum(t.turns) AS turns
    FROM rollouts AS r
    INNER JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id
    INNER JOIN thought AS t ON r.experiment = t.experiment AND r.rollout_id = t.rollout_id
    WHERE
        r.origin = 'eval'
        AND s.origin = 'eval'
        AND s.reward IS NOT NULL
        AND NOT s.infrastructure_error
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
    GROUP BY ALL
),

paired AS (
    SELECT
        earlier.experiment,
        earlier.decoding,
        earlier.checkpoint_role AS before,
        later.checkpoint_role AS after,
        earlier.place,
        later.place AS later_place,
        count(*) AS tasks,
        avg(earlier.solved) AS solved_before,
        avg(later.solved) AS solved_after,
        avg(later.solved - earlier.solved) AS difference,
        1.96 * stddev_samp(later.solved - earlier.solved) / sqrt(count(*)) AS half_width,
        sum(earlier.think_tokens) / sum(earlier.turns) AS think_before,
        sum(later.think_tokens) / sum(later.turns) AS think_after
    FROM judged AS earlier
    INNER JOIN judged AS later
        ON
            earlier.experiment = later.experiment
            AND earlier.decoding = later.decoding
            AND earlier.task_id = later.task_id
            AND earlier.place < later.place
    GROUP BY ALL
)

SELECT
    experiment,
    decoding,
    before,
    after,
    tasks,
    solved_before,
    solved_after,
    difference,
    difference - half_width AS ci_low,
    difference + half_width AS ci_high,
    think_before,
    think_after,
    think_before / nullif(think_after, 0) AS think_ratio
FROM paired
ORDER BY experiment ASC, decoding ASC, place ASC, later_place ASC;
