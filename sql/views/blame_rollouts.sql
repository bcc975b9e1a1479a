-- One row per training rollout of an experiment with [blame]: how much it raised (above 0) or lowered (below 0) the
-- held-out metric. influence is the sum over its tokens, harm that of the tokens below 0, which its good tokens do not
-- hide; both are means over the checkpoints that [blame] names. The worst turn is the one with the lowest influence.
CREATE OR REPLACE VIEW blame_rollouts AS
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
INNER JOIN facts AS f ON r.experiment = f.experiment AND r.rollout_id = f.rollout_id;
