-- Which turns was this checkpoint trained on: of which task and teacher, and how were they sampled?
-- SET VARIABLE checkpoint = 'checkpoint_id'; the default is the first final fine-tuned checkpoint.
-- One page of 1,000 turns, in order: the first. SET VARIABLE page = 1 for the second; SET VARIABLE page_rows =
-- 1000000000 for all turns at once.
SET VARIABLE asked = coalesce(
    getvariable('checkpoint'),
    (
        SELECT c.checkpoint_id FROM checkpoints AS c
        WHERE c.role = 'sft' AND c.final
        ORDER BY c.experiment, c.seed
        LIMIT 1
    )
);

SET VARIABLE page_size = coalesce(getvariable('page_rows'), 1000);

WITH page AS (
    SELECT *
    FROM lineage
    WHERE checkpoint_id = getvariable('asked')
    ORDER BY experiment, via_checkpoint_id, rollout_id, agent_id, turn
    LIMIT
        getvariable('page_size')
        OFFSET coalesce(getvariable('page'), 0) * getvariable('page_size')
),

origins AS (
    SELECT
        rollout_id,
        any_value(suite) AS suite,
        any_value(sampler) AS sampler
    FROM rollouts
    WHERE origin IN ('set', 'rl') AND rollout_id IN (SELECT p.rollout_id FROM page AS p)
    GROUP BY rollout_id
)

SELECT
    l.checkpoint_id,
    l.experiment,
    l.via_checkpoint_id,
    l.dataset_row_id,
    l.rollout_id,
    l.agent_id,
    l.turn,
    l.task_id,
    l.repo,
    l.teacher,
    o.sampler,
    l.weight * l.copies AS total_weight,
    l.output_tokens,
    t.instruction
FROM page AS l
LEFT JOIN origins AS o ON l.rollout_id = o.rollout_id
LEFT JOIN tasks AS t ON l.task_id = t.task_id AND o.suite = t.suite
ORDER BY l.experiment, l.via_checkpoint_id, l.rollout_id, l.agent_id, l.turn;
