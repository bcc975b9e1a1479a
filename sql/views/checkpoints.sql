-- One row per checkpoint: the base of an experiment, and the checkpoints it trained, with intermediate steps.
CREATE OR REPLACE VIEW checkpoints AS
SELECT * FROM base_checkpoint.checkpoints
UNION ALL BY NAME
SELECT * FROM sft_checkpoint.checkpoints
UNION ALL BY NAME
SELECT * FROM rl_checkpoint.checkpoints;
