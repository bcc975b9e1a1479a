-- One row per assistant turn as the student sees it, with whole input_ids, rebuilt losslessly.
CREATE OR REPLACE VIEW tito_pairs AS
WITH placed AS (
    SELECT
        t.*,
        c.pieces,
        c.paths[list_position(c.numbers, t.turn)] AS path
    FROM tito_pairs.pairs AS t
    INNER JOIN prompt_chains AS c
        ON
            t.rollout_id = c.rollout_id
            AND t.agent_id = c.agent_id
            AND t.experiment = c.made_for
            AND c.source = 'pairs'
)

SELECT
    experiment,
    pair_id,
    CASE WHEN path IS NOT NULL THEN list_concat(flatten(list_select(pieces, path)), suffix_ids) END AS input_ids,
    output_ids,
    metadata,
    * EXCLUDE (experiment, pair_id, output_ids, metadata, suffix_ids, pieces, path)
FROM placed;
