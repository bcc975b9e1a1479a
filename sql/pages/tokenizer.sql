-- The name of the tokenizer of a rollout's ids: that of its rollout set, or of its experiment's base.
SELECT
    CASE
        WHEN getvariable('origin') = 'set'
            THEN (
                SELECT s.tokenizer FROM rollout_sets AS s
                WHERE s.rollout_set = getvariable('made_for')
            )
        ELSE (
            SELECT e.spec ->> '$.base.tokenizer' FROM experiments AS e
            WHERE e.experiment = getvariable('made_for')
        )
    END AS tokenizer;
