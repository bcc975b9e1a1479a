-- The turns of one rollout, without their token ids. The partition is a condition of its own, so that DuckDB reads
-- only its file.
SELECT
    agent_id,
    turn,
    capture,
    drift_at,
    prompt_tokens,
    output_tokens,
    finish_reason,
    content,
    reasoning,
    think_tokens,
    actions,
    parse_error,
    observation,
    exit_code,
    inbox,
    turns.at AS finished_at,
    suffix_ids IS NOT NULL AS has_ids
FROM turns
WHERE
    rollout_id = getvariable('rollout')
    AND origin = getvariable('origin')
    AND (getvariable('origin') != 'set' OR rollout_set = getvariable('made_for'))
    AND (getvariable('origin') = 'set' OR experiment = getvariable('made_for'))
ORDER BY agent_id, turn;
