-- The experiments of the catalog, with the settings that tell them apart.
SELECT
    e.experiment,
    e.title,
    e.rollout_sets,
    e.seeds,
    e.base,
    e.method,
    e.rl_method,
    e.spec,
    e.sha256,
    v.version AS dataset_version,
    v.created_at AS dataset_made_at
FROM experiments AS e
LEFT JOIN versions AS v ON e.experiment = v.key AND v.asset = 'upweighted_dataset'
WHERE getvariable('experiment') IS NULL OR e.experiment = getvariable('experiment')
ORDER BY e.experiment;
