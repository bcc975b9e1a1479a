-- One row per resolved spec of any kind.
CREATE OR REPLACE VIEW specs AS
SELECT
    kind,
    name,
    title,
    spec,
    sha256
FROM suite_spec.specs
UNION ALL BY NAME
SELECT
    kind,
    name,
    title,
    spec,
    sha256
FROM rollout_set_spec.specs
UNION ALL BY NAME
SELECT
    kind,
    name,
    title,
    spec,
    sha256
FROM experiment_spec.specs;
