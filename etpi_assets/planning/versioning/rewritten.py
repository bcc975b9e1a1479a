"""Definitions that were rewritten and still return the same: code versions keep the digests from before.

A row holds for exactly one text of a definition: any later edit changes its digest, and then counts as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAINERS = "etpi_resources.trainers"
_GRPO, _STATES = f"{_TRAINERS}.workers.grpo_worker", f"{_TRAINERS}.workers.states"
_HAND_OVER = f"{_TRAINERS}.workers.hand_over"

_IN_SEVERAL_PROCESSES = {
    "etpi_assets.specs.training:FEW_TASKS": ("d0191da65459fdff", ""),
    "etpi_assets.specs.training:RLSection.gpus": ("4cd0f3a2e4ddb406", ""),
    "etpi_assets.specs.training:RLSection.groups": ("6986e8f4880f4e1e", ""),
    "etpi_assets.specs.training:RLSection.round_size": ("fd7c636680ada8be", ""),
    "etpi_assets.training.grpo:GrpoRequest._key": ("a030978d919051e6", ""),
    "etpi_assets.training.grpo:GrpoRequest.identity": ("1166e35767a41984", "27b9ad438d04bef9"),
    "etpi_assets.training.grpo:GrpoRequest.key": ("fcdb1d0091ef7db5", "557cc58390e29262"),
    "etpi_assets.training.grpo:GrpoRequest.rollouts_key": ("91691e324d6583bf", ""),
    "etpi_assets.training.grpo:LOG_COLUMNS": ("248e3d9ba006dcb0", "82a64e699091e773"),
    "etpi_assets.training.grpo:LORA_RANKS": ("1c9556d63e0eee2e", ""),
    "etpi_assets.training.grpo:PROBE_IDS": ("e0f49b4a70184b62", ""),
    "etpi_assets.training.grpo:_start_servers": ("741717c3dcb8492d", ""),
    "etpi_assets.training.grpo:recorded": ("1cf2182e5e2c0114", "54a384a78c6d8a13"),
    "etpi_assets.training.grpo:reinforce_once": ("8b7284b9744d4325", "4e0244befdf2f3dc"),
    "etpi_assets.training.grpo:server_devices": ("777979ff1b8a4f33", ""),
    "etpi_assets.training.grpo:server_plan": ("194fe6937e294ddf", ""),
    "etpi_assets.training.grpo:worker_config": ("d41c48b821a012e7", "e2f4faeb4aa5c229"),
    "etpi_assets.training.grpo_checks:_rollouts_recorded": ("86973058caaf43f0", "40365976f9c06330"),
    "etpi_assets.training.rounds:with_prompts_that_fit": ("4948f8fd01b6ec08", "7781d1385b865867"),
    "etpi_resources.engines.vllm_options:_PARALLEL": ("af6844854e230ed1", ""),
    "etpi_resources.engines.vllm_options:_SHORT": ("67a776cab6211f21", ""),
    "etpi_resources.engines.vllm_options:accelerators_of": ("df7c66b4b4de5157", ""),
    f"{_TRAINERS}.contracts:Correction": ("459f441a82e6c704", ""),
    f"{_TRAINERS}.contracts:GrpoLogLine": ("0311041b82444a2d", "55bc398649cc6ce9"),
    f"{_TRAINERS}.contracts:GrpoSettings": ("551c56631f8d0dda", "0aa8932695db66d0"),
    f"{_TRAINERS}.contracts:GrpoWorkerConfig": ("d1f9fd248d2bf21e", "d9feca601fd69976"),
    f"{_TRAINERS}.contracts:PublishConfig": ("03f5e1c352203cda", ""),
    f"{_TRAINERS}.interpreter:DEVICES_VARIABLE": ("a0736f0f687c9285", ""),
    f"{_TRAINERS}.interpreter:find_trainer_gpu": ("8dbc6700fd15e5a1", "09f669e9cc05d2e8"),
    f"{_TRAINERS}.interpreter:visible": ("774cb91713438784", ""),
    f"{_TRAINERS}.policy_link:Generate": ("51933b02591c3827", ""),
    f"{_TRAINERS}.policy_link:PolicyClient.__init__": ("14b8f19ac60eddec", "aed604584379dc05"),
    f"{_TRAINERS}.policy_link:PolicyClient.roll_out": ("efb099d21e20b83c", "84857b92c92d3dd8"),
    f"{_TRAINERS}.policy_link:PolicyServer.__init__": ("647b31f4aee7c9d7", "3d19b9ed19e960d6"),
    f"{_TRAINERS}.policy_link:PolicyServer._engine": ("9cdd9dc4cfad373f", ""),
    f"{_TRAINERS}.policy_link:PolicyServer._run_round": ("0789577ba847686d", "b2a00cc8dc54a378"),
    f"{_TRAINERS}.policy_link:Published": ("3a06df42b6fa376a", ""),
    f"{_TRAINERS}.policy_servers:HandOverFailed": ("2fce5a8316420119", ""),
    f"{_TRAINERS}.policy_servers:MEMORY": ("48ccbd08b38c2b9d", ""),
    f"{_TRAINERS}.policy_servers:NEARER": ("c3299937a29609ae", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers.__enter__": ("95962c41060a6f22", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers.__exit__": ("434fb39d9f08970c", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers._ask": ("fc42e2d9ecfdf35d", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers._exit_reason": ("5daabe17f95054fe", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers._load_adapter": ("019db131dd88809a", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers._prove": ("158cc88c93d83433", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers._start": ("8ff82fdb2c047a30", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers.close": ("a6ed763e728e3fa7", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers.complete": ("121574b823e4c473", ""),
    f"{_TRAINERS}.policy_servers:PolicyServers.generating": ("bec14e444839000e", ""),
    f"{_TRAINERS}.policy_servers:ROOM": ("62df2ef73017c3db", ""),
    f"{_TRAINERS}.policy_servers:ServerPlan": ("c25831d8c532cf9f", ""),
    f"{_TRAINERS}.policy_servers:_mean_gap": ("5cf698f4539cd39e", ""),
    f"{_TRAINERS}.policy_servers:stored_dtype_name": ("c03e59d4f526c099", ""),
    f"{_TRAINERS}.policy_servers:weights_folder": ("8e695154bd076f34", ""),
    f"{_GRPO}:<main>": ("6b1cfc9281fc0d7e", "b23ce3b2c1293e2c"),
    f"{_GRPO}:GrpoLog.__init__": ("55f99446d01f3988", "9df0d999e02d0e34"),
    f"{_GRPO}:GrpoLog._gap_metrics": ("d5a9afda05e177b7", "fdaa94eab950b52f"),
    f"{_GRPO}:GrpoLog._step_seconds": ("04098660594e7c6f", ""),
    f"{_GRPO}:GrpoLog.callback": ("9f0a9bcf363fc1bb", "78c58f7e246b00a9"),
    f"{_GRPO}:GrpoLog.save": ("a1ecf885b9b3eac5", "8626f15a83fc8dfa"),
    f"{_GRPO}:GrpoLog.write": ("8c0d4ad681cf3a63", "8fcf01d33dc9070f"),
    f"{_GRPO}:ROLLOUT_SECONDS": ("ee8c8d60c6441049", ""),
    f"{_GRPO}:build_trainer": ("78a5746f05394f75", "b551a27c8a24a88c"),
    f"{_GRPO}:gather": ("9cb316e2e0eb83da", ""),
    f"{_GRPO}:leave_memory_to_servers": ("78fc879e8e467a55", ""),
    f"{_GRPO}:load": ("a398e9aa972b4909", "1a3305b1edf773c7"),
    f"{_GRPO}:run": ("d8dde1587411e8cb", "b12ca5c50f6d02f9"),
    f"{_GRPO}:statistics_callback": ("6c4eb6b40016ca90", "2601e0c3c838c1b8"),
    f"{_GRPO}:trainer_arguments": ("51f387ef23bb12c6", "4f819c0e6182c34f"),
    f"{_TRAINERS}.workers.policy_trainer:BOUND_TOKENS": ("46269ed766aaf77b", ""),
    f"{_TRAINERS}.workers.policy_trainer:PolicyTrainer": ("51b4e379f59219d6", "d2ca175e4a852afa"),
    f"{_TRAINERS}.workers.policy_trainer:SCHEDULER": ("852da9e25b5ee832", ""),
    f"{_STATES}:States.restore": ("5282514cd85c11d8", "8300fd2faccc4bcc"),
    f"{_STATES}:States.save_if_due": ("3e7380cda171d1aa", "bbaeb7744975af9c"),
    f"{_STATES}:read_shards": ("71862385c0192b52", ""),
}
"""Definitions that since serve several processes, corrections and servers of the run: today's digest and that before;
"" for one that is new. One process that generates itself computes the same as before."""

REWRITTEN: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("etpi_assets.training.device:trainer_gpu", "f1b2fc7621b85f39"): {
        "etpi_assets.training.device:trainer_gpu": "0c372c2ae694967e",
        "etpi_resources.trainers.node_launcher:GPU": "eb0bbd2524cd93ab",
        "etpi_resources.trainers.over_nodes:find_gpu_of_ranks": "5832605ace58d471",
        "etpi_resources.trainers.over_nodes:spans_nodes": "7998bd0068d89f59",
    },
    ("etpi_resources.engines.vllm_server:start_servers", "ba6716429c7beb2a"): {
        "etpi_resources.engines.vllm_server:start_servers": "db2ff04664dc531b",
    },
    ("etpi_assets.training.rounds:Rounds._write", "6d74253b6c828172"): {
        "etpi_assets.training.rounds:Rounds._write": "c6785628a1b554ca",
        "etpi_assets.training.rounds:SAMPLES_KEY": "1d6878f6abc5c866",
    },
    ("etpi_assets.training.rounds:read_rounds", "6fab23a5cfd299f4"): {
        "etpi_assets.training.rounds:read_rounds": "23634bbfe98c040a",
        "etpi_assets.training.rounds:SAMPLES_KEY": "1d6878f6abc5c866",
    },
    (f"{_TRAINERS}.policy_servers:PolicyServers.__init__", "1e7fd9c09de577a1"): {
        "etpi_assets.training.grpo:_server": "ad22b3bddbfffb09",
        f"{_TRAINERS}.contracts:PolicyServerConfig": "ead02a9d783ea805",
        f"{_HAND_OVER}:HandOverFailed": "2fce5a8316420119",
        f"{_HAND_OVER}:HandedPolicy.__init__": "72832c9094a0a98b",
        f"{_HAND_OVER}:HandedPolicy._prove": "9e00df877440ad6c",
        f"{_HAND_OVER}:HandedPolicy._release": "76ece6d6fcef3b81",
        f"{_HAND_OVER}:HandedPolicy.close": "8722bacf2f620ee1",
        f"{_HAND_OVER}:HandedPolicy.complete": "121574b823e4c473",
        f"{_HAND_OVER}:HandedPolicy.generating": "78d26adcbfbce47a",
        f"{_HAND_OVER}:NEARER": "c3299937a29609ae",
        f"{_HAND_OVER}:PROBE_IDS": "e0f49b4a70184b62",
        f"{_HAND_OVER}:save_merged": "c12782036b3385ee",
    },
    ("etpi_resources.engines.scripted:ScriptedEngine._complete", "e28b4034eccc272a"): {
        "etpi_resources.engines.scripted:ScriptedEngine._complete": "f78739584a286884",
    },
    (f"{_STATES}:_shards", "26aa2bb88790196b"): {f"{_STATES}:States._shards": "631dce090a636df0"},
    (f"{_STATES}:write_shards", "66edac000ee2d2cd"): {f"{_STATES}:States._write_shards": "e3f1cb77c2ed95e7"},
    ("etpi_resources.sandboxes:Limits", "fd8a08122c8ebd52"): {
        "etpi_resources.sandboxes:Limits": "c6f54b1f4af031b8",
    },
    ("etpi_resources.sandboxes.bubblewrap:_Command.line", "193bfcdb37767bbf"): {
        "etpi_resources.sandboxes.bubblewrap:_Command.line": "f71faad472631b2d",
    },
    ("etpi_assets.agent.loop:run_rollout", "dada7b632608a19a"): {
        "etpi_assets.agent.loop:run_rollout": "69f40c5cb4ffffeb",
    },
    ("etpi_assets.rollouts.assets:_rollout_function", "3ece80c17252965f"): {
        "etpi_assets.rollouts.assets:_rollout_function": "8dc6dcb31cae8820",
    },
    ("etpi_assets.evaluation.rollouts:_roll_out", "758b2234df92869f"): {
        "etpi_assets.evaluation.rollouts:_roll_out": "5f3011468f8c286d",
    },
    ("etpi_assets.curation.default_prompt:DefaultPrompts.__init__", "74b747c91a8f88d4"): {
        "etpi_assets.curation.default_prompt:DefaultPrompts.__init__": "b7c1595f319dd5df",
    },
    ("etpi_assets.evaluation.assets:_plan", "de2917ae9ad27750"): {
        "etpi_assets.evaluation.assets:_plan": "4de9d91254eae9b8",
    },
    ("etpi_resources.chat.grammars:ThinkGrammar.lark", "8651ff6bc1071bfa"): {
        "etpi_resources.chat.grammars:ThinkGrammar.lark": "bc2f8220b7a14678",
    },
    ("etpi_resources.engines.masks:GrammarMasks.__init__", "d6971138eba1d762"): {
        "etpi_resources.engines.masks:GrammarMasks.__init__": "3c027cf0ec802134",
    },
    ("etpi_resources.engines.masks:GrammarMasks.start", "ff59b1eb0a310f5b"): {
        "etpi_resources.engines.masks:GrammarMasks.start": "2fdb46e911c1a7af",
    },
    ("etpi_assets.worlds.arithmetic_tiny.policy:ArithmeticSkill", "d91950bef0636ec0"): {
        "etpi_assets.worlds.arithmetic_tiny.policy:ArithmeticSkill": "d91950bef0636ec0",
        "etpi_assets.worlds.arithmetic_tiny.policy:BASE_HABITS": "418d911be49d50cd",
    },
    ("etpi_assets.worlds.coop_tiny_shared.policy:SharedSkill", "de8f0fea3dcdae29"): {
        "etpi_assets.worlds.coop_tiny_shared.policy:SharedSkill": "de8f0fea3dcdae29",
        "etpi_assets.worlds.coop_tiny_shared.policy:BASE_HABITS": "5f28c4b5aa0ea468",
    },
    ("etpi_assets.rollouts.assets:_open_engine", "92321ba3a4e0b715"): {
        "etpi_assets.rollouts.assets:_open_engine": "f0e760a851b3479d",
    },
    ("etpi_assets.rollouts.teachers:make_engine", "aaed70df53f66bce"): {
        "etpi_assets.rollouts.teachers:make_engine": "a73ff195cd500a33",
    },
    ("etpi_assets.rollouts.models:model_engine", "67c35a3dbc3ed74b"): {
        "etpi_assets.rollouts.models:model_engine": "d087e5ab16a0964f",
    },
    ("etpi_assets.rollouts.models:_local_vllm", "e6b750bea8585c80"): {
        "etpi_assets.rollouts.models:_local_vllm": "35d040533a061e0d",
    },
    ("etpi_assets.resources:Resources.serving", "dd911ffbe1ba143f"): {
        "etpi_assets.resources:Resources.serving": "ca79b183e23e5a96",
    },
    ("etpi_assets.evaluation.assets:_serving", "add9269f9251e49f"): {
        "etpi_assets.evaluation.assets:_serving": "15767a954b00ec7c",
    },
    ("etpi_assets.evaluation.assets:_expected", "0651fcc8214fcf6d"): {
        "etpi_assets.evaluation.assets:_expected": "3542e672c57f9203",
    },
    ("etpi_assets.specs.experiment:EvaluateSection.longest_context", "09d9b611c2caf6ae"): {},
    ("etpi_resources.engines.vllm_server:with_context", "a95b679ff048e195"): {},
    ("etpi_assets.tasks.places:test_sandbox", "f8db0eaa1d00f176"): {
        "etpi_assets.tasks.places:test_sandbox": "262f6649d0ff77f9",
    },
} | {(name, today): {name: before} if before else {} for name, (today, before) in _IN_SEVERAL_PROCESSES.items()}
"""(definition, its digest today) -> {definition: digest} that code versions contain in its place.

The rows are of functions that ask for the backend (`etpi_resources.backend`), of renamed keys, those
that tell vLLM's server the budget of its requests, those of grammars, which now also take vocabularies
without think tokens, the skills of policies, beside which stood the habits of a tiny base,
and those that a foreign harness, its limit of addresses or its logs pass through.
"""
