-- Turns whose rebuilt prompt has another length than the captured one.
SELECT
    origin,
    rollout_set,
    experiment,
    rollout_id,
    agent_id,
    turn,
    prompt_tokens,
    len(prompt_ids) AS rebuilt_tokens
FROM full_turns
WHERE capture != 'none' AND len(prompt_ids) IS DISTINCT FROM prompt_tokens;
