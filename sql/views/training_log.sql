-- One row per logged training step.
CREATE OR REPLACE VIEW training_log AS
SELECT * FROM sft_checkpoint.training_log
UNION ALL BY NAME
SELECT * FROM rl_checkpoint.training_log;
