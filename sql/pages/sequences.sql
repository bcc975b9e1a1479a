-- A page of the merged sequences of an experiment's data set: tokens, branches, rows and the weight of their loss. The
-- page is chosen first, by narrow columns, so that only its token ids are read. sort: id, branches, loss, influence
-- (the lowest first). task:
-- a part of the task's name. contains: a part of a turn's text. trained_ids: the first ids in the loss.
WITH blamed AS (
    SELECT
        sequence_id,
        sum(influence) / count(DISTINCT concat(seed, '/', step)) AS influence
    FROM blame
    WHERE experiment = getvariable('experiment')
    GROUP BY sequence_id
),

weighed AS (
    SELECT
        sequence_id,
        split,
        rollout_id,
        agent_id,
        len(node_starts) AS nodes,
        len(span_starts) AS spans,
        rows AS merged_rows,
        (
            SELECT b.influence FROM blamed AS b
            WHERE b.sequence_id = sequences.sequence_id
        ) AS influence,
        list_sum(
            list_transform(list_zip(span_starts, span_ends, span_weights), LAMBDA x: (x[2] - x[1]) * x[3])
        ) AS loss
    FROM sequences
    WHERE
        experiment = getvariable('experiment')
        AND (getvariable('rollout') IS NULL OR rollout_id = getvariable('rollout'))
        AND (getvariable('split') IS NULL OR split = getvariable('split'))
        AND (
            getvariable('contains') IS NULL
            OR rollout_id IN (
                SELECT u.rollout_id FROM turns AS u
                WHERE
                    u.rollout_id IN (
                        SELECT v.rollout_id FROM selected AS v
                        WHERE v.experiment = getvariable('experiment')
                    )
                    AND contains(
                        lower(concat(u.content, ' ', u.observation)), lower(getvariable('contains')::VARCHAR)
                    )
            )
        )
        AND (
            getvariable('task') IS NULL
            OR rollout_id IN (
                SELECT t.rollout_id FROM selected AS t
                WHERE
                    t.experiment = getvariable('experiment')
                    AND contains(lower(t.task_id), lower(getvariable('task')))
            )
        )
),

chosen AS MATERIALIZED (
    SELECT *
    FROM weighed
    ORDER BY
        CASE getvariable('sort')
            WHEN 'branches' THEN nodes WHEN 'loss' THEN loss WHEN 'influence' THEN -influence
        END DESC NULLS LAST,
        split ASC, sequence_id ASC
    LIMIT getvariable('count') OFFSET getvariable('first')
)

SELECT
    c.*,
    s.rollout_set,
    s.task_id,
    i.input_ids[i.span_starts[1] + 1:least(i.span_ends[1], i.span_starts[1] + 60)] AS trained_ids,
    (SELECT count(*) FROM weighed) AS matches
FROM chosen AS c
LEFT JOIN sequences AS i ON i.experiment = getvariable('experiment') AND c.sequence_id = i.sequence_id
LEFT JOIN selected AS s ON s.experiment = getvariable('experiment') AND c.rollout_id = s.rollout_id
ORDER BY
    CASE getvariable('sort')
        WHEN 'branches' THEN c.nodes WHEN 'loss' THEN c.loss WHEN 'influence' THEN -c.influence
    END DESC NULLS LAST,
    c.split ASC, c.sequence_id ASC;
