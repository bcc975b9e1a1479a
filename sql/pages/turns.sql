-- The turns of rollouts of one partition (rollouts: their ids), without their token ids. The partition is a condition
-- of its own, so that DuckDB reads only its file. list_contains reads the texts of these rollouts alone, IN would read
-- those of all.
SELECT
    t.rollout_id,
    t.agent_id,
    t.turn,
    t.capture,
    t.drift_at,
    t.prompt_tokens,
    t.output_tokens,
    t.finish_reason,
    t.content,
    t.reasoning,
    t.think_tokens,
    t.actions,
    t.parse_error,
    t.observation,
    t.exit_code,
    t.inbox,
    t.at AS finished_at,
    t.suffix_ids IS NOT NULL AS has_ids
FROM turns AS t
WHERE
    list_contains(getvariable('rollouts')::VARCHAR[], t.rollout_id)
    AND t.origin = getvariable('origin')
    AND (getvariable('origin') != 'set' OR t.rollout_set = getvariable('made_for'))
    AND (getvariable('origin') = 'set' OR t.experiment = getvariable('made_for'))
ORDER BY t.rollout_id, t.agent_id, t.turn;
