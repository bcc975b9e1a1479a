-- How do tool calls and right answers develop during reinforcement?
-- For each step: the share of attempts that called a tool, that were right, and that were right among those with and
-- without a call. SET VARIABLE experiment = 'name' for one experiment.
SELECT
    experiment,
    seed,
    step,
    count(*) AS attempts,
    round(avg(called::INT), 3) AS called,
    round(avg(solved::INT), 3) AS solved,
    round(avg(solved::INT) FILTER (WHERE called), 3) AS solved_with_a_call,
    round(avg(solved::INT) FILTER (WHERE NOT called), 3) AS solved_without
FROM rl_samples
WHERE getvariable('experiment') IS NULL OR experiment = getvariable('experiment')
GROUP BY experiment, seed, step
ORDER BY experiment, seed, step;
