-- One row a checkpoint: where an experiment starts from, and what it trained, intermediate steps included.
CREATE OR REPLACE VIEW checkpoints AS
SELECT * FROM base_checkpoint.checkpoints
UNION ALL BY NAME
SELECT * FROM sft_checkpoint.checkpoints
UNION ALL BY NAME
SELECT * FROM rl_checkpoint.checkpoints;
