-- One row per value of a reward function for a rollout of reinforcement: the value that training used (applied), and
-- the value that the function returns now.
CREATE OR REPLACE VIEW rewards AS
SELECT * FROM rl_checkpoint.rewards
UNION ALL BY NAME
SELECT * FROM rl_rewards.rewards;
