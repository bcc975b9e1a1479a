-- Pairs whose rebuilt input has another length than the original.
SELECT
    experiment,
    pair_id,
    input_tokens,
    len(input_ids) AS rebuilt_tokens
FROM tito_pairs
WHERE len(input_ids) IS DISTINCT FROM input_tokens;
