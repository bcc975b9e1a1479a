-- One row per training row behind a checkpoint, from checkpoint to task. via_checkpoint_id is the checkpoint that was
-- trained on the row: the checkpoint itself, or an ancestor. Rows are those of the data version that the trainer read,
-- even if the data set was rebuilt since. origin is 'set' for a row of a data set, and 'rl' for a turn that a policy
-- wrote and was reinforced on; its weight is the agent's advantage (of distillation, the mean of the rollout's tokens),
-- its dataset_row_id and dataset_version are null.
-- Of experiments that share a training, a checkpoint has the rows of its own, or of the first in order.
CREATE OR REPLACE VIEW lineage AS
WITH RECURSIVE parents AS (
    SELECT DISTINCT
        checkpoint_id,
        parent_id
    FROM checkpoints
    WHERE parent_id IS NOT NULL AND parent_id != checkpoint_id
),

ancestry AS (
    SELECT DISTINCT
        checkpoint_id,
        checkpoint_id AS via_checkpoint_id
    FROM checkpoints
    UNION -- not ALL, so that a cycle of pinned checkpoints ends
    SELECT
        a.checkpoint_id,
        p.parent_id
    FROM ancestry AS a
    INNER JOIN parents AS p ON a.via_checkpoint_id = p.checkpoint_id
),

trainers AS (
    SELECT
        checkpoint_id,
        min(experiment) AS first_experiment,
        list(experiment) AS experiments
    FROM checkpoints
    WHERE role IN ('sft', 'rl')
    GROUP BY checkpoint_id
),

trained AS (
    SELECT DISTINCT
        checkpoint_id,
        experiment,
        dataset_version
    FROM checkpoints
    WHERE dataset_version IS NOT NULL
),

trained_turns AS (
    SELECT
        t.checkpoint_id AS via_checkpoint_id,
        t.experiment AS trainer,
        t.dataset_version,
        d.dataset_row_id,
        d.rollout_id,
        d.agent_id,
        d.turn,
        d.task_id,
        d.repo,
        d.teacher,
        d.weight,
        d.copies,
        d.output_tokens,
        'set' AS origin
    FROM trained AS t
    INNER JOIN upweighted_dataset.dataset_rows_history AS d ON t.dataset_version = d.version
    WHERE d.split = 'train'
    UNION ALL BY NAME
    SELECT
        c.checkpoint_id AS via_checkpoint_id,
        c.experiment AS trainer,
        s.rollout_id,
        t.agent_id,
        t.turn,
        s.task_id,
        r.repo,
        r.teacher,
        coalesce(
            s.token_advantage, s.agent_advantages[list_position(s.agents, t.agent_id)], s.advantage
        ) AS weight,
        1 AS copies,
        t.output_tokens,
        'rl' AS origin
    FROM rl_checkpoint.checkpoints AS c
    INNER JOIN rl_checkpoint.rl_samples AS s ON c.experiment = s.experiment AND c.seed = s.seed AND c.step > s.step
    INNER JOIN rl_checkpoint.rollouts AS r ON s.experiment = r.experiment AND s.rollout_id = r.rollout_id
    INNER JOIN rl_checkpoint.turns AS t ON s.experiment = t.experiment AND s.rollout_id = t.rollout_id
    WHERE s.left_out IS NULL
),

judged AS (
    SELECT
        rollout_id,
        arg_max(verdict_trust, number) AS verdict_trust
    FROM verdicts
    GROUP BY rollout_id
),

trusted AS (
    SELECT
        r.rollout_id,
        any_value(coalesce(j.verdict_trust, r.outcome ->> '$.details.verdict_trust')) AS verdict_trust
    FROM rollouts AS r
    LEFT JOIN judged AS j ON r.rollout_id = j.rollout_id
    GROUP BY r.rollout_id
)

SELECT
    c.checkpoint_id,
    c.experiment,
    c.role,
    c.seed,
    c.step,
    c.final,
    l.* EXCLUDE (trainer), -- noqa: RF02
    v.verdict_trust
FROM checkpoints AS c
INNER JOIN ancestry AS a ON c.checkpoint_id = a.checkpoint_id
INNER JOIN trainers AS t ON a.via_checkpoint_id = t.checkpoint_id
INNER JOIN trained_turns AS l
    ON
        a.via_checkpoint_id = l.via_checkpoint_id
        AND l.trainer
        = CASE WHEN list_contains(t.experiments, c.experiment) THEN c.experiment ELSE t.first_experiment END
LEFT JOIN trusted AS v ON l.rollout_id = v.rollout_id
WHERE c.role IN ('sft', 'rl');
