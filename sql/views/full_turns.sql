-- One row per assistant turn with its whole prompt_ids, rebuilt losslessly; NULL where no ids were captured.
CREATE OR REPLACE VIEW full_turns AS
WITH placed AS (
    SELECT
        t.*,
        c.pieces,
        c.paths[list_position(c.numbers, t.turn)] AS path
    FROM turns AS t
    INNER JOIN prompt_chains AS c
        ON
            t.rollout_id = c.rollout_id
            AND t.agent_id = c.agent_id
            AND t.origin = c.origin
            AND t.made_for = c.made_for
            AND c.source = 'turns'
)

SELECT
    * EXCLUDE (suffix_ids, pieces, path),
    CASE
        WHEN path IS NOT NULL AND suffix_ids IS NOT NULL
            THEN list_concat(flatten(list_select(pieces, path)), suffix_ids)
    END AS prompt_ids
FROM placed;
