-- Which training rollouts raised or lowered the held-out metric, and by which turn most?
-- SET VARIABLE experiment = 'name' for one experiment. influence is the sum over tokens, harm that of the tokens below
-- 0, which good tokens of the same rollout do not hide; both are means over the checkpoints that [blame] names. The
-- most harmful first. The worst turn is the one with the lowest influence. `etpi blame` shows groups of them.
WITH of_turns AS (
    SELECT
        experiment,
        objective,
        rollout_id,
        agent_id,
        turn,
        sum(influence) / count(DISTINCT concat(seed, '/', step)) AS influence,
        sum(harm) / count(DISTINCT concat(seed, '/', step)) AS harm,
        count(DISTINCT dataset_row_id) AS n_rows
    FROM blame
    WHERE getvariable('experiment') IS NULL OR experiment = getvariable('experiment')
    GROUP BY experiment, objective, rollout_id, agent_id, turn
),

of_rollouts AS (
    SELECT
        experiment,
        objective,
        rollout_id,
        sum(influence) AS influence,
        sum(harm) AS harm,
        sum(n_rows)::INTEGER AS n_rows,
        arg_min(agent_id, influence) AS worst_agent,
        arg_min(turn, influence) AS worst_turn,
        min(influence) AS worst_influence
    FROM of_turns
    GROUP BY experiment, objective, rollout_id
),

facts AS (
    SELECT DISTINCT ON (experiment, rollout_id)
        experiment,
        rollout_id,
        rollout_set,
        task_id,
        repo,
        teacher,
        sampler,
        importer,
        exit_status,
        verdict_trust,
        flipped
    FROM blame
)

SELECT
    r.*,
    f.* EXCLUDE (experiment, rollout_id) -- noqa: RF02
FROM of_rollouts AS r
INNER JOIN facts AS f ON r.experiment = f.experiment AND r.rollout_id = f.rollout_id
ORDER BY r.experiment, r.harm, r.rollout_id;
