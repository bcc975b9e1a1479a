-- One row per experiment: its training data and method.
CREATE OR REPLACE VIEW experiments AS
SELECT
    name AS experiment,
    title,
    (spec -> '$.rollout_sets')::VARCHAR[] AS rollout_sets,
    (spec -> '$.seeds')::INTEGER[] AS seeds,
    spec ->> '$.base.kind' AS base,
    spec ->> '$.train.method' AS method,
    spec ->> '$.rl.method' AS rl_method,
    spec,
    sha256
FROM experiment_spec.specs;
