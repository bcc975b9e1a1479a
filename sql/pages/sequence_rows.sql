-- The dataset rows of one merged sequence, in the order of their spans.
SELECT
    dataset_row_id,
    rollout_id,
    agent_id,
    turn,
    split,
    weight,
    copies,
    span_start,
    span_end
FROM dataset_rows
WHERE experiment = getvariable('experiment') AND sequence_id = getvariable('sequence')
ORDER BY span_start, turn;
