-- The influence of each output token of training rows, averaged over the checkpoints that blame read: of a sequence, or
-- of one turn of a rollout. span_start: the first output position within the sequence.
WITH of_tokens AS (
    SELECT
        b.dataset_row_id,
        b.span_start,
        unnest(b.influences) AS influence,
        unnest(range(len(b.influences))) AS place
    FROM blame AS b
    WHERE
        b.experiment = getvariable('experiment')
        AND (getvariable('sequence') IS NULL OR b.sequence_id = getvariable('sequence'))
        AND (
            getvariable('rollout') IS NULL
            OR (
                b.rollout_id = getvariable('rollout')
                AND b.agent_id = getvariable('agent')
                AND b.turn = getvariable('turn')
            )
        )
),

averaged AS (
    SELECT
        dataset_row_id,
        span_start,
        place,
        avg(influence) AS influence
    FROM of_tokens
    GROUP BY dataset_row_id, span_start, place
)

SELECT
    span_start,
    list(influence ORDER BY place) AS influences,
    sum(influence) AS influence
FROM averaged
GROUP BY dataset_row_id, span_start
ORDER BY span_start;
