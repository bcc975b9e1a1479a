-- One row per data set, checkpoint, evaluation or report that rests on a verdict that flipped since it was made. With
-- the variable `roots` (a list of rollouts) it rests on one of them, and earlier versions of data sets have rows too;
-- else a flip that `etpi taint --keep` accepted taints nothing. A checkpoint has a row for each ancestor that was
-- trained so (via_checkpoint_id). share is that of the label tokens of the training data, of the reward (tokens times
-- size of the advantage), or of the rollouts of an evaluation. Evaluations and reports of such a checkpoint have its
-- largest share.
CREATE OR REPLACE VIEW tainted AS
WITH changed AS (
    SELECT
        rollout_id,
        list({ 'judged_at': judged_at, 'old': old_reward, 'new': new_reward } ORDER BY judged_at) AS steps
    FROM flips
    GROUP BY rollout_id
    HAVING arg_max(coalesce(kept, ''), judged_at) = ''
),

-- A group's advantages rest on every reward of the group.
mates AS (
    SELECT DISTINCT
        a.rollout_id,
        b.rollout_id AS mate
    FROM rl_samples AS a
    INNER JOIN rl_samples AS b
        ON a.experiment = b.experiment AND a.seed = b.seed AND a.step = b.step AND a.task_id = b.task_id
),

-- The time at which a version of a data set last agreed with the verdicts on a rollout.
agreed AS (
    SELECT
        h.version,
        h.experiment,
        h.is_current,
        h.rollout_id,
        max(CASE WHEN h.is_current AND s.rollout_id IS NOT NULL THEN v.created_at ELSE h.created_at END) AS agreed_at,
        sum(h.copies * h.output_tokens) AS tokens,
        count(*) AS n_rows
    FROM dataset_history AS h
    LEFT JOIN selected AS s ON h.experiment = s.experiment AND h.rollout_id = s.rollout_id
    LEFT JOIN versions AS v ON h.experiment = v.key AND v.asset = 'selected_trajectories'
    WHERE h.split = 'train'
    GROUP BY ALL
),

rows_of AS (
    SELECT
        version,
        rollout_id,
        max(agreed_at) AS agreed_at
    FROM agreed
    GROUP BY version, rollout_id
),

-- Every training use of a rollout, by what was trained or built.
uses AS (
    SELECT
        'dataset' AS kind,
        experiment,
        version AS name,
        NULL AS checkpoint_id,
        NULL AS role,
        NULL AS seed,
        NULL AS step,
        is_current AS final,
        NULL AS via_checkpoint_id,
        'label tokens' AS share_of,
        rollout_id,
        agreed_at,
        n_rows,
        tokens
    FROM agreed
    WHERE is_current OR getvariable('roots') IS NOT NULL
    UNION ALL BY NAME
    SELECT
        'checkpoint' AS kind,
        l.experiment,
        l.checkpoint_id AS name,
        l.checkpoint_id,
        l.role,
        l.seed,
        l.step,
        l.final,
        l.via_checkpoint_id,
        CASE WHEN l.origin = 'rl' THEN 'reward' ELSE 'label tokens' END AS share_of,
        l.rollout_id,
        any_value(r.agreed_at) AS agreed_at,
        count(*) AS n_rows,
        sum(CASE WHEN l.origin = 'rl' THEN abs(l.weight) ELSE l.copies END * l.output_tokens) AS tokens
    FROM lineage AS l
    LEFT JOIN rows_of AS r ON l.dataset_version = r.version AND l.rollout_id = r.rollout_id
    GROUP BY ALL
    UNION ALL BY NAME
    SELECT
        'evaluation' AS kind,
        experiment,
        checkpoint_role AS name,
        checkpoint_id,
        checkpoint_role AS role,
        seed,
        NULL AS step,
        NULL AS final,
        NULL AS via_checkpoint_id,
        'rollouts' AS share_of,
        rollout_id,
        'infinity'::TIMESTAMPTZ AS agreed_at, -- metrics are computed again with each verdict
        1 AS n_rows,
        1 AS tokens
    FROM eval_rollouts.rollouts
),

groups_of AS (
    SELECT
        a.rollout_id,
        list(a.mate) AS mates,
        bool_or(coalesce(f.steps[1].old != f.steps[-1].new, FALSE)) AS flipped
    FROM mates AS a
    LEFT JOIN changed AS f ON a.mate = f.rollout_id
    GROUP BY a.rollout_id
),

judged AS (
    SELECT
        u.*,
        CASE
            WHEN getvariable('roots') IS NOT NULL
                THEN
                    list_contains(getvariable('roots')::VARCHAR[], u.rollout_id)
                    OR coalesce(list_has_any(getvariable('roots')::VARCHAR[], m.mates), FALSE)
            WHEN u.share_of = 'reward'
                THEN coalesce(m.flipped, FALSE)
            ELSE
                coalesce( -- noqa: PRS
                    list_filter(c.steps, LAMBDA x : x.judged_at > u.agreed_at)[1].old != c.steps[-1].new, -- noqa
                    FALSE
                )
        END AS rests
    FROM uses AS u
    LEFT JOIN changed AS c ON u.rollout_id = c.rollout_id
    LEFT JOIN groups_of AS m ON u.rollout_id = m.rollout_id AND u.share_of = 'reward'
),

reached AS (
    SELECT
        kind,
        experiment,
        name,
        checkpoint_id,
        role,
        seed,
        step,
        final,
        via_checkpoint_id,
        share_of,
        count(DISTINCT rollout_id) FILTER (rests) AS rollouts,
        (sum(n_rows) FILTER (rests))::BIGINT AS n_rows,
        (sum(tokens) FILTER (rests) / nullif(sum(tokens), 0))::DOUBLE AS share
    FROM judged
    GROUP BY ALL
    HAVING bool_or(rests)
),

measured AS (
    SELECT
        'evaluation' AS kind,
        e.experiment,
        e.checkpoint_role AS name,
        e.checkpoint_id,
        e.checkpoint_role AS role,
        e.seed,
        NULL AS step,
        NULL AS final,
        t.via_checkpoint_id,
        t.share_of,
        t.rollouts,
        NULL AS n_rows,
        max(t.share) AS share
    FROM eval_rollouts.rollouts AS e
    INNER JOIN reached AS t
        ON e.checkpoint_id = t.checkpoint_id AND e.experiment = t.experiment AND t.kind = 'checkpoint'
    GROUP BY ALL
)

SELECT * FROM reached
UNION ALL BY NAME
SELECT * FROM measured
UNION ALL BY NAME
SELECT
    'report' AS kind,
    r.experiment,
    r.path AS name,
    NULL AS checkpoint_id,
    NULL AS role,
    NULL AS seed,
    NULL AS step,
    NULL AS final,
    NULL AS via_checkpoint_id,
    arg_max(t.share_of, t.share) AS share_of,
    max(t.rollouts) AS rollouts,
    NULL AS n_rows,
    max(t.share) AS share
FROM reports AS r
INNER JOIN reached AS t ON r.experiment = t.experiment AND (t.kind = 'evaluation' OR t.final)
GROUP BY ALL;
