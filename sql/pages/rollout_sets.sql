-- The rollout sets of the catalog.
SELECT
    rollout_set,
    title,
    kind,
    suite,
    teacher,
    k,
    tokenizer
FROM rollout_sets
ORDER BY rollout_set;
