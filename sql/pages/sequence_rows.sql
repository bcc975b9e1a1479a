-- The dataset rows of one merged sequence, in the order of their spans.
SELECT
    d.dataset_row_id,
    d.rollout_id,
    s.rollout_set,
    d.agent_id,
    d.turn,
    d.split,
    d.weight,
    d.copies,
    d.span_start,
    d.span_end
FROM dataset_rows AS d
LEFT JOIN selected AS s ON d.experiment = s.experiment AND d.rollout_id = s.rollout_id
WHERE d.experiment = getvariable('experiment') AND d.sequence_id = getvariable('sequence')
ORDER BY d.span_start, d.turn;
