-- A page of the merged sequences of an experiment's data set: tokens, branches, rows and the weight of their loss. The
-- page is chosen first, by narrow columns, so that only its token ids are read. sort: id, branches, loss. task:
-- a part of the task's name.
WITH weighed AS (
    SELECT
        sequence_id,
        split,
        rollout_id,
        agent_id,
        len(node_starts) AS nodes,
        len(span_starts) AS spans,
        rows AS merged_rows,
        list_sum(
            list_transform(list_zip(span_starts, span_ends, span_weights), LAMBDA x: (x[2] - x[1]) * x[3])
        ) AS loss
    FROM sequences
    WHERE
        experiment = getvariable('experiment')
        AND (getvariable('rollout') IS NULL OR rollout_id = getvariable('rollout'))
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
        CASE getvariable('sort') WHEN 'branches' THEN nodes WHEN 'loss' THEN loss END DESC NULLS LAST,
        split ASC, sequence_id ASC
    LIMIT getvariable('count') OFFSET getvariable('first')
)

SELECT
    c.*,
    s.rollout_set,
    s.task_id,
    (SELECT count(*) FROM weighed) AS matches
FROM chosen AS c
LEFT JOIN selected AS s ON s.experiment = getvariable('experiment') AND c.rollout_id = s.rollout_id
ORDER BY
    CASE getvariable('sort') WHEN 'branches' THEN c.nodes WHEN 'loss' THEN c.loss END DESC NULLS LAST,
    c.split ASC, c.sequence_id ASC;
