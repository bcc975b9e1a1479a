"""Definitions that were rewritten and still return the same: code versions keep the digests from before.

A row holds for exactly one text of a definition: any later edit changes its digest, and then counts as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

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
}
"""(definition, its digest today) -> {definition: digest} that code versions contain in its place.

The rows are of functions that ask for the backend (`etpi_resources.backend`), of renamed keys, those of grammars, which
now also take vocabularies without think tokens, the skills of policies, beside which stood the habits of a tiny base,
and those that a foreign harness or its limit of addresses passes through.
"""
