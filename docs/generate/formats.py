"""Write docs/reference/formats.md from the registries of importers and exports."""

from __future__ import annotations

import inspect

from etpi_assets.exports import EXPORTS
from etpi_assets.importers import IMPORTERS
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.spec import SHIPPED, base, load

_HEAD = """# Formats in and out

Generated from the registries by `make docs`; do not edit.

## In

A rollout set of `kind = "imported"` names a `path` (a folder or a file; `${VARIABLE}` is read from the environment) and
a `format`. With `format = "auto"`, the default, each file decides: a program's own file layout is recognised before
rows, and rows with a program's own columns before rows that only have messages; formats of your own come last. Files of
several formats may lie in one folder, and rows of several in one file; session files within the run folders of a format
are part of its runs. Every input becomes a rollout or a row of `quarantined` with file, row, reason and remedy, files
that no format claims too; a blocking check compares their sum with the number of inputs. Columns and keys that no
format reads are counted ([unread](../own_data.md#columns-and-keys-that-nothing-reads)).
 One process per core reads parts of the files and streams them to
the lake, so memory does not grow with the input.

```toml
title = "Recorded runs"
kind = "imported"
format = "auto"
path = "${RUNS}/of/mine"
[options]
tokenizer = "qwen3"
```
"""
_OUT = """## Out

`make export EXPERIMENT=name FORMAT=format TO=folder`, or `etpi export name --format format --to folder`. The folder
must be new or empty. It appears only when the export is complete, and equal data give equal bytes. Its `manifest.json`
names every data version behind the export (tasks, rollouts, selection, pairs, data set, checkpoints), the files with
their rows and sha256, what was left out, and notes for readers. Blocked versions are not exported. Rows have the splits
of training.

For llama.cpp, its own script converts an exported `model`:
`python convert_hf_to_gguf.py out/model --outfile student.gguf --outtype bf16`.
"""
_COMMON = """## What every importer accepts

Every importer reads gzip and zstd under any file name; byte order marks; NaN (a missing value); NUL characters; lines
of 100 MB; one object whose `data` is the list of rows; times as epoch seconds, milliseconds, digits, ISO 8601 with or
without a zone, or parquet timestamps (all become UTC); call arguments as text or as objects; structs padded with nulls;
content as text or as parts.

These inputs are quarantined with a reason, and the import continues: lone surrogates, bytes that are not UTF-8,
truncated JSON, truncated or damaged streams (rows before the damage are imported), damaged parquet, images, unknown
roles, malformed ids, conversations that begin with the assistant, compressed files that hold over 1000 times their
size, rows over 256 MiB, links that lead out of the import's folder.
"""


_COMPARED = """## Public files that were compared

Counts of the importer equal those of an independent reading of about twenty lines, for the files of these commits.

| format | files | rollouts | turns | calls | results | rewards | quarantined |
|---|---|---|---|---|---|---|---|
| `claude_code` | `daaain/claude-code-log@a641071a1`, 4 of `test/test_data` | 3 | 12 | 5 | 5 | | 1 (a bare text) |
| `claude_code` | `simonw/claude-code-transcripts@cad133d91`, `tests/sample_session.jsonl` | 1 | 3 | 2 | 2 | | 0 |
| `claude_code` | `jazzyalex/agent-sessions@651e854f4`, 4 of `stage0/agents/claude` | 4 | 8 | 3 | 2 | | 0 |
| `claude_code` | `jnarowski/agentcmd@958c4940e`, 6 of `fixtures/claude/full` | 4 | 46 | 58 | 54 | | 2 (image, a copy) |
| `gemini_cli` | `jazzyalex/agent-sessions@651e854f4`, 3 of `stage0/agents/gemini` | 3 | 7 | 3 | 3 | | 0 |
| `qwen_code` | `jazzyalex/agent-sessions@651e854f4`, 6 of `agents/qwen` | 2 | 4 | 2 | 1 | | 4 (no answer, cut) |
| `codex` | `jnarowski/agentcmd@958c4940e`, 5 of `fixtures/codex/full` | 4 | 310 | 298 | 298 | | 1 (image) |
| `codex` | `madshn/localpush@219b5397b`, 6 of `fixtures/codex/2026-02-23` | 5 | 199 | 372 | 370 | | 1 (image) |
| `codex` | `jazzyalex/agent-sessions@651e854f4`, 7 made by hand | 0 | 0 | 0 | 0 | | 7 (no answer, unknown items) |
| `trl` | `PrimeIntellect-ai/verifiers@8d994fbae`, 24 files | 1,002 | 4,573 | 3,543 | 3,501 | 1,002 | 24 (no answer) |
| `trl` | `intertwine/security-verifiers@27f7c044d`, 6 of `results/runs` | 123 | 201 | 78 | 78 | 123 | 0 |
| `sharegpt` | `hiyouga/LLaMA-Factory@ff6d4d12e`, 2 of `data/glaive_toolcall_*` | 600 | 1,897 | 427 | 429 | | 0 |
| `messages` | the same, `reason_tool_use`, `kto`, `v1_sft`, 4 of media | 850 | 1,099 | 68 | 42 | 300 | 36 (media) |
| `nemo_gym` | `NVIDIA-NeMo/Gym@07d6b0d07`, 128 files | | 1,209 | 1,010 | 598 | 585 | 55 |
| `inspect` | `UKGovernmentBEIS/inspect_ai@499e6152e`, 16 logs | | 49 | 9 | 9 | 30 | 1 |
| `tau2` | `codesque16/tau2-bench@c9e1346e5`, `toolorchestra_nvidia` | 164 | 1,482 | 1,454 | 1,454 | 164 | 0 |
| `tau2` | `yoheinakajima/activegraph-tau2-bench@2d8e2c251`, 16 of `tau2_output` | 29 | 166 | 98 | 98 | 29 | 0 |
| `tau2` | `sierra-research/tau2-bench@a2c024725`, 3 of `tests/test_voice` | 0 | 0 | 0 | 0 | 0 | 3 (audio) |
| `openai_batch` | `cho-groq/batch-processing@90b523049` (chat) | 3 | 3 | 0 | 0 | | 0 |
| `openai_batch` | `Valzaak/openai-demo@0302dd50a` (Responses) | 3 | 3 | 0 | 0 | | 0 |
| `swe_agent` | `SWE-agent/SWE-agent@3ea751c08`, all 22 `.traj` | 22 | 230 | 44 | 44 | | 0 |
| `swe_agent` | `princeton-nlp/SWE-agent@0772c99cb`, all 28 `.traj` | 28 | 296 | 44 | 44 | | 0 |
| `swe_agent` | `SWE-bench/SWE-smith@cf2e649d1`, 3 of `tests/test_logs` | 3 | 76 | 76 | 76 | | 0 |
| `mini_swe_agent` | `SWE-agent/mini-swe-agent@a83fcae82`, 2 of `tests/test_data` | 2 | 12 | 0 | 0 | | 0 |
| `mini_swe_agent` | `RussellRyanH/CSCI-635-LiveSWE-Agent@2813cfb19`, all 45 | 45 | 897 | 897 | 852 | | 0 |
| `openhands` | `M-Myron/OpenHands_SWE-Bench-Optimized@e306d4fd1`, 6 files | 9 | 145 | 142 | 137 | 2 | 0 |
| `openhands` | `nunu0404/Python_OpenHands@c80bab5aa`, `output.jsonl` | 1 | 20 | 20 | 19 | | 0 |
| `harbor` | `xdotli/harbor-datagen@d9a569e3c`, 3 trials of Claude Code | 3 | 63 | 77 | 77 | 3 | 0 |
| `atif` | `xuanZH424/evolving-skills@f695ec184`, 10 of `tests/golden` | 6 | 28 | 15 | 14 | | 0 |
| `cooperbench` | `racso1999/CooperBench@1de6e9682`, 7 of `logs` | 199 | 8,993 | 8,719 | 8,719 | 194 | 18 (17 no runs) |

The rows of `trl` are results of verifiers and of prime-rl. The files of `openhands` are `output.jsonl` and
`tests/runtime/trajs`. The trials of `harbor` were compared with the session files in them, and the documents of `atif`
had the names by which they refer to each other. The runs of `cooperbench` are `flash_*_1` and
`nano_{coauthor,control,dc,free_git,handshake}_1`; 7 more messages in them are the harness's errors and no turns.

Written by the programs themselves: `traces.jsonl` of verifiers 0.4.0 (4 episodes of its own `write_episode`: 3
rollouts, 1 quarantined; none in public), and sessions of Claude Code 2.1.332, Codex 0.171.0, Gemini CLI
0.61.0 and Qwen Code 0.24.4 against a stand-in for their server, which tests read back turn by turn.
"""
_HUB = """## To a Hugging Face Hub

An export is a folder that huggingface-hub's own command uploads; it is installed with etpi:

```
hf auth login                           # or: export HF_TOKEN=...
etpi export plan_first_tiny --format hub   --to out/data  && hf upload me/plan-first-data out/data --repo-type dataset
etpi export plan_first_tiny --format model --to out/model && hf upload me/plan-first out/model --private
```

`hub` has two configurations and a data card, `model` the model card. Each card names the experiment, the version of
etpi, the git revision behind the data, teachers, licences, every data version from tasks to checkpoint, and the SQL
that traces the training tokens. `--delete "*"` removes files that an earlier upload had. Values of API keys that etpi
knows cannot be in an export, since the lake refuses tables that have them. `HF_ENDPOINT` names another hub.

Read it with `datasets.load_dataset("me/plan-first-data", "tokens")`, or
`AutoModelForCausalLM.from_pretrained("me/plan-first", revision="v2")`; with several training seeds add
`subfolder="seed0"`.
"""


def page() -> str:
    """Write the page as markdown."""
    lines = [_HEAD]
    for importer in IMPORTERS.values():
        doc = importer.doc
        facts = {"Files": doc.files, "Keeps": doc.keeps, "Loses": doc.loses}
        lines += _section(importer.name, doc.title, **facts, **_claims(importer.name))
    lines += [
        "### Options",
        "",
        *_options(),
        "",
        f"Known roles: {', '.join(f'`{role}`' for role in base().roles)}.",
        "",
    ]
    lines += [_COMMON, _COMPARED, _OUT]
    for export in EXPORTS.values():
        back = f"the importer `{export.importer}`" if export.importer else "no importer"
        facts = {"Files": export.files, "Keeps": export.keeps, "Loses": export.loses}
        lines += _section(export.name, export.title, **facts, **{"Read by": f"{export.read_by}; {back}"})
    return "\n".join([*lines, _HUB]).rstrip() + "\n"


def _claims(name: str) -> dict[str, str]:
    """Return the paths by which a format that is data claims a row."""
    if name not in SHIPPED:
        return {}
    claims = [
        " and ".join(f"`{path}`" for path in claim) for spec in load(name) for claim in spec.data.get("claims", ())
    ]
    of = f"[{name}.toml](../../etpi_assets/importers/formats/{name}.toml)"
    return {"Data": f"{of}; a row has {', or '.join(claims)}" if claims else of}


def _section(name: str, title: str, **facts: str) -> list[str]:
    return [f"### `{name}`", "", f"{title}.", "", *(f"- {label}: {text}." for label, text in facts.items()), ""]


def _options() -> list[str]:
    """List the options with the descriptions in the docstring of their class."""
    attributes = inspect.cleandoc((Options.__doc__ or "").partition("Attributes:")[2])
    entries = attributes.replace("\n    ", " ").splitlines()
    return [f"- `{name}`: {text}" for name, _, text in (entry.partition(": ") for entry in entries)]
