"""A run that needs sandboxes stops before it spends anything where none can start, and says what allows them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etpi import cli
from etpi.run import preflight
from etpi.run.preflight import require_inputs, require_sandboxes, require_templates, sandbox_kind
from etpi_assets.planning.planner import Step, plan
from etpi_assets.specs.load import SpecError, load_specs
from etpi_resources.chat import bounds
from etpi_resources.lake.lake import Lake
from etpi_resources.sandboxes import SandboxUnavailable, namespaces
from tests.support.graph import write_spec


def _machine(root: Path, *, marks: tuple[str, ...] = (), **settings: str) -> Path:
    """A folder that looks like the /proc and the container marks of a machine."""
    for name, value in settings.items():
        file = root / "proc/sys" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    for mark in marks:
        (root / mark).parent.mkdir(parents=True, exist_ok=True)
        (root / mark).touch()
    return root


@pytest.mark.parametrize(
    ("machine", "words", "cause", "remedy"),
    [
        (
            {"user__max_user_namespaces": "0"},
            "bwrap: No space left on device",
            "user.max_user_namespaces = 0 forbids",
            "Allow them: sudo sysctl -w user.max_user_namespaces=15000",
        ),
        (
            {"user__max_user_namespaces": "0", "marks": (".dockerenv",)},
            "bwrap: No space left on device",
            "user.max_user_namespaces = 0 forbids",
            "Allow them on the host of this container: sudo sysctl",
        ),
        (
            {"kernel__unprivileged_userns_clone": "0"},
            "bwrap: No permissions to create a new namespace",
            "kernel.unprivileged_userns_clone = 0 forbids",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            {"kernel__apparmor_restrict_unprivileged_userns": "1", "user__max_user_namespaces": "1000"},
            "bwrap: setting up uid map: Permission denied",
            "AppArmor forbids user namespaces to programs without a profile",
            "sudo apparmor_parser -r /etc/apparmor.d/bwrap",
        ),
        (
            {"marks": ("run/.containerenv",)},
            "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
            "this container's engine forbids",
            "podman run --security-opt seccomp=unconfined --security-opt 'unmask=/proc/*'",
        ),
        (
            {"marks": (".dockerenv",)},
            "bwrap: Unexpected capabilities but not setuid, old file caps config?",
            "some of root's rights",
            "--user 1000 --cap-drop ALL",
        ),
        ({}, "bwrap: Operation not permitted", "a filter of system calls", "unshare --user"),
    ],
)
def test_the_message_names_the_cause_and_the_remedy(tmp_path: Path, machine, words, cause, remedy):
    said = namespaces.refused(words, _machine(tmp_path, **machine), environment={})
    assert cause in said and remedy in said and words in said
    assert 'sandbox = "docker"' in said.splitlines()[-1], "the way out where nothing may be changed"


@pytest.mark.parametrize(
    ("asset", "set_name", "key", "kind"),
    [
        ("tasks", "suite", "coop_tiny_shared", "bubblewrap"),
        ("raw_rollouts", "rollout_set", "coop_tiny_shared_strong", "bubblewrap"),
        ("raw_rollouts", "rollout_set", "plan_first_templated_v1", None),
        ("raw_rollouts", "rollout_set", "cooperbench_logs", None),
        ("eval_rollouts", "experiment", "plan_first_tiny", "bubblewrap"),
        ("rl_checkpoint", "experiment", "plan_first_tiny", None),
        ("rl_checkpoint", "experiment", "grpo_tcr_tiny", "bubblewrap"),
        ("sft_checkpoint", "experiment", "plan_first_tiny", None),
    ],
)
def test_which_steps_run_commands(asset, set_name, key, kind):
    assert sandbox_kind(Step(asset, set_name, key, "missing"), load_specs()) == kind


class _Refusing:
    """A factory of sandboxes that cannot start; counts how often it was asked."""

    asked = 0

    def check(self) -> None:
        self.asked += 1
        raise SandboxUnavailable("the cause and the remedy")


def test_preflight_checks_once_per_run_and_not_without_open_steps(tmp_path: Path):
    specs, refusing = load_specs(), _Refusing()
    steps = plan("plan_first_tiny", specs, Lake(tmp_path))
    with pytest.raises(SandboxUnavailable, match="(?s)tasks of coop_tiny_shared.*the cause and the remedy"):
        require_sandboxes(steps, specs, lambda kind: refusing)  # pyright: ignore[reportArgumentType]
    assert refusing.asked == 1
    done = [Step(step.asset, step.set, step.key, "ok") for step in steps]
    require_sandboxes(done, specs, lambda kind: refusing)  # pyright: ignore[reportArgumentType]
    assert refusing.asked == 1


def _demo(folder: Path, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ETPI_DATA": str(folder / "data"), **options.pop("env", {})}
    words = [*options.pop("before", []), sys.executable, "-m", "etpi", "demo"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, **options)


def _nothing_was_made(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "locks"]


def test_demo_without_bubblewrap_stops_at_once(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    done = _demo(tmp_path, env={"PATH": str(tmp_path / "bin")})
    assert done.returncode == 1
    assert "bubblewrap" in done.stderr and "sudo apt-get install bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr and _nothing_was_made(tmp_path)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")
def test_demo_where_user_namespaces_are_forbidden_stops_at_once(tmp_path: Path):
    """In a real user namespace in which the kernel lets nobody make another one."""
    program = Path(__file__).parents[1] / "support/no_user_namespaces.py"
    probe = subprocess.run([sys.executable, str(program), "true"], capture_output=True, text=True)
    if probe.returncode == 77:
        pytest.skip(f"no user namespace can be made here to forbid further ones in: {probe.stderr}")
    done = _demo(tmp_path, before=[sys.executable, str(program)])
    assert done.returncode == 1, done.stderr
    assert "user.max_user_namespaces = 0" in done.stderr
    assert "sudo sysctl -w user.max_user_namespaces=15000" in done.stderr
    assert done.stderr.count("bubblewrap could not start a sandbox") == 1
    assert "Traceback" not in done.stderr and _nothing_was_made(tmp_path)


@pytest.mark.slow
def test_run_stops_before_a_template_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 2)
    (tmp_path / "endless.jinja").write_text("{{ 'x' * 6000000000 }}")
    write_spec(tmp_path / "specs", "experiments", "hostile", f'''
        title = "t"
        extends = "plan_first_tiny"
        [base]
        kind = "tiny"
        chat_template = "{tmp_path / 'endless.jinja'}"
    ''')  # fmt: skip
    specs, lake = load_specs(tmp_path / "specs"), Lake(tmp_path / "lake")
    with pytest.raises(SpecError, match=" of hostile: .*template"):
        require_templates(plan("hostile", specs, lake), specs)
    require_templates(plan("plan_first_tiny", specs, lake), specs)


def test_missing_runs_and_unknown_rewards_stop_a_run_before_it_starts(tmp_path: Path) -> None:
    write_spec(tmp_path, "rollout_sets", "gone", 'title = "t"\nkind = "imported"\npath = "gone.jsonl"\n')
    base = 'title = "t"\nrollout_sets = ["gone"]\nbase = {kind = "tiny"}\n'
    write_spec(tmp_path, "experiments", "e", base)
    rl = '[rl]\nmethod = "grpo"\nsuite = "terminal_tiny"\nrewards = [{function = "formatt"}]\n'
    write_spec(tmp_path, "experiments", "r", base.replace('["gone"]', "[]") + rl)
    specs, lake = load_specs(tmp_path), Lake(tmp_path / "lake")
    with pytest.raises(SpecError, match=r"gone\.toml: path: .*gone\.jsonl"):
        require_inputs(plan("e", specs, lake), specs)
    with pytest.raises(SpecError, match=r"r\.toml: rl\.rewards: .*'format'"):
        require_inputs(plan("r", specs, lake), specs)


@pytest.mark.parametrize("section", ["[serving]", "[rl]\nrepeatable = false"])
def test_run_starts_no_server_that_loads_code_of_a_spec_without_consent(tmp_path, monkeypatch, capsys, section) -> None:
    head = f'title = "t"\nextends = "terminal_grpo_tiny"\n{section}'
    server = 'engine = "vllm"\nallow_code = true\noptions = {trust-remote-code = true}'
    write_spec(tmp_path / "specs", "experiments", "code", f"{head}\n{server}\n")
    for variable, folder in {"ETPI_SPECS": "specs", "ETPI_DATA": "lake", "DAGSTER_HOME": "home"}.items():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setenv("ETPI_ALLOW_CODE", "0")

    def stop(*_: object) -> None:
        raise SandboxUnavailable("the run has come to its sandboxes")

    monkeypatch.setattr(preflight, "require_sandboxes", stop)
    assert cli.main(["run", "code"]) == 1
    assert "trust-remote-code" in (error := capsys.readouterr().err) and "--allow-code" in error
    assert cli.main(["run", "--allow-code", "code"]) == 1
    assert "come to its sandboxes" in capsys.readouterr().err
