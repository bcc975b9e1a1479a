-- What of an experiment rests on verdicts that flipped since.
SELECT *
FROM tainted
WHERE experiment = getvariable('experiment')
ORDER BY list_position(['dataset', 'checkpoint', 'evaluation', 'report'], kind), role, seed, step, via_checkpoint_id;
