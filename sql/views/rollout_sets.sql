-- One row per rollout set: kind, suite, teacher and samples per task.
CREATE OR REPLACE VIEW rollout_sets AS
SELECT
    name AS rollout_set,
    title,
    spec ->> '$.kind' AS kind,
    spec ->> '$.suite' AS suite,
    spec ->> '$.engine.teacher' AS teacher,
    (spec ->> '$.k')::INTEGER AS k,
    spec ->> '$.agent.tokenizer' AS tokenizer,
    spec,
    sha256
FROM rollout_set_spec.specs;
