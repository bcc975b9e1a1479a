-- The experiments that made a training pair of one turn of a set's rollout, and the tokenizer of its ids.
SELECT DISTINCT
    p.experiment,
    e.spec ->> '$.base.tokenizer' AS tokenizer
FROM tito_pairs.pairs AS p
LEFT JOIN experiments AS e ON p.experiment = e.experiment
WHERE
    p.rollout_id = getvariable('rollout')
    AND p.agent_id = getvariable('agent')
    AND p.turn = getvariable('turn')
ORDER BY p.experiment;
