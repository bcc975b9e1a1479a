-- How soon does training teach a behaviour? The first step from which nine in ten first turns on held-out prompts show
-- it, by experiment, seed and probe; null if the last checkpoint is below nine in ten. Needs train.save_steps, which
-- saves intermediate checkpoints.
WITH curve AS (
    SELECT DISTINCT
        checkpoints.experiment,
        probes.role,
        probes.seed,
        probes.probe,
        checkpoints.step,
        probes.value
    FROM probes
    INNER JOIN checkpoints
        ON probes.experiment = checkpoints.experiment AND probes.checkpoint_id = checkpoints.checkpoint_id
    WHERE
        probes.prompt_set = 'heldout' AND probes.role != 'base'
        AND probes.probe IN ('first_turn_parses', 'first_turn_message')
),

missed AS (
    SELECT
        experiment,
        role,
        seed,
        probe,
        max(step) FILTER (WHERE value < 0.9) AS last_missed
    FROM curve
    GROUP BY ALL
)

SELECT
    curve.experiment,
    curve.role,
    curve.seed,
    curve.probe,
    count(*) AS checkpoints,
    min(curve.step) FILTER (WHERE curve.step > coalesce(missed.last_missed, -1)) AS learnt_at_step,
    last(curve.value ORDER BY curve.step) AS value_at_the_end
FROM curve
INNER JOIN missed USING (experiment, role, seed, probe)
GROUP BY ALL
ORDER BY curve.experiment, curve.role, curve.seed, curve.probe;
