-- The experiments whose trainings logged steps.
SELECT DISTINCT experiment FROM training_log
ORDER BY experiment;
