-- Which held-out tasks does the reinforced checkpoint newly parse or solve, and which does it lose, compared with SFT?
-- SET VARIABLE experiment = 'name' for one experiment. Parsed: every turn had a readable action. `command` is the first
-- that the reinforced checkpoint wrote.
WITH read AS (
    SELECT
        experiment,
        rollout_id,
        bool_and(coalesce(parse_rate = 1, FALSE)) AS parsed
    FROM agent_scores
    WHERE origin = 'eval'
    GROUP BY experiment, rollout_id
),

judged AS (
    SELECT
        r.rollout_id,
        r.experiment,
        r.decoding,
        r.seed,
        r.sample_seed,
        r.task_id,
        r.suite,
        r.checkpoint_role,
        a.parsed,
        coalesce(s.reward = 1, FALSE) AS solved
    FROM rollouts AS r
    INNER JOIN read AS a ON r.experiment = a.experiment AND r.rollout_id = a.rollout_id
    INNER JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id
    WHERE r.origin = 'eval' AND s.origin = 'eval' AND NOT s.infrastructure_error
),

paired AS (
    SELECT
        later.rollout_id,
        before.experiment,
        before.decoding,
        before.seed,
        before.sample_seed,
        before.task_id,
        before.suite,
        before.parsed AS parsed_before,
        later.parsed AS parsed_after,
        before.solved AS solved_before,
        later.solved AS solved_after
    FROM judged AS before
    INNER JOIN judged AS later
        ON
            before.experiment = later.experiment
            AND before.decoding = later.decoding
            AND before.seed = later.seed
            AND coalesce(before.sample_seed, 0) = coalesce(later.sample_seed, 0)
            AND before.task_id = later.task_id
    WHERE
        before.checkpoint_role = 'sft' AND later.checkpoint_role = 'rl'
        AND (before.parsed != later.parsed OR before.solved != later.solved)
),

commands AS (
    SELECT
        t.rollout_id,
        arg_min(json_extract_string(t.actions, '$[0].command'), row(t.turn, t.agent_id)) AS command
    FROM turns AS t
    INNER JOIN paired AS p ON t.rollout_id = p.rollout_id
    WHERE json_array_length(t.actions) > 0
    GROUP BY t.rollout_id
)

SELECT
    p.experiment,
    p.decoding,
    p.seed,
    p.sample_seed,
    p.task_id,
    p.parsed_after AND NOT p.parsed_before AS newly_parsed,
    p.parsed_before AND NOT p.parsed_after AS parse_lost,
    p.solved_after AND NOT p.solved_before AS newly_solved,
    p.solved_before AND NOT p.solved_after AS newly_lost,
    t.instruction,
    c.command
FROM paired AS p
LEFT JOIN tasks AS t ON p.suite = t.suite AND p.task_id = t.task_id
LEFT JOIN commands AS c ON p.rollout_id = c.rollout_id
WHERE getvariable('experiment') IS NULL OR p.experiment = getvariable('experiment')
ORDER BY
    p.experiment ASC,
    p.decoding ASC,
    p.seed ASC,
    p.sample_seed ASC,
    newly_solved DESC,
    newly_parsed DESC,
    p.task_id ASC;
