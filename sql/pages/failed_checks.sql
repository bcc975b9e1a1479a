-- The checks of an experiment, of its rollout sets and of their suites that fail now, blocking ones first.
WITH named AS (
    SELECT
        experiment,
        unnest(rollout_sets) AS rollout_set
    FROM experiments
    WHERE experiment = getvariable('experiment')
),

keys AS (
    SELECT
        'experiment' AS kind,
        getvariable('experiment')::VARCHAR AS name
    UNION
    SELECT
        'rollout_set' AS kind,
        rollout_set AS name
    FROM named
    UNION
    SELECT
        'suite' AS kind,
        s.suite AS name
    FROM named AS n
    INNER JOIN rollout_sets AS s ON n.rollout_set = s.rollout_set
)

SELECT
    c.asset,
    c.key,
    c.state,
    c.check_name,
    c.blocking,
    c.message
FROM checks AS c
INNER JOIN keys AS k ON c.set = k.kind AND c.key = k.name
WHERE NOT c.passed AND c.applicable AND c.state IN ('current', 'blocked')
ORDER BY c.blocking DESC, c.asset ASC, c.check_name ASC;
