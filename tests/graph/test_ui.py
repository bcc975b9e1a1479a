"""The web page, as a person uses it: run an experiment, look at an asset.

A headless Chromium drives `etpi ui` over the real definitions, with specs of a user: a small suite, a scripted
teacher, and an experiment that trains nothing, so that what is tested is the page and the daemon.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.graph import write_spec
from tests.support.hostile_page import NAME, RESOLVES_HERE, attack, hostile_page
from tests.support.waiting import until
from tests.support.web_server import free_port

selenium = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (.ci/run installs them)"),
]

EXPERIMENT = """
title = "Seen from the web page"
preset = "plan_first"
rollout_sets = ["page_set"]
evaluate = "none"

[base]
kind = "none"
tokenizer = "tiny"
chat_template = "tiny"

[train]
method = "none"

[dataset]
val_fraction = 0

[gates]
format_exposure = 1
"""


def _wait(what: str, test: Callable[[], Any], seconds: float = 150) -> Any:
    """The first true answer; page elements come and go, so their errors are tried again."""
    errors = (WebDriverException, urllib.error.URLError, ConnectionError, TimeoutError, AssertionError)
    return until(test, seconds, what, 0.5, errors)


class Page:
    """A browser on a running `etpi ui`."""

    def __init__(self, address: str, browser: Any) -> None:
        self.address, self.browser = address, browser

    def open(self, path: str) -> None:
        self.browser.get(self.address + path)

    def button(self, text: str) -> None:
        def press() -> bool:
            result = self.browser.find_elements(By.XPATH, f"//button[not(@disabled) and contains(., '{text}')]")
            result[0].click() if result else None
            return bool(result)

        _wait(f"button {text!r}", press)

    def choose(self, text: str, opener: tuple[str, str]) -> None:
        """An entry of the list that a click on `opener` opens; opened anew where the page was drawn again."""

        def press() -> bool:
            entries = [e for e in self.browser.find_elements(By.CSS_SELECTOR, "li") if e.text == text]
            entries[0].find_element(By.CSS_SELECTOR, "*").click() if entries else None
            return bool(entries)

        def open_and_press() -> bool:
            self.browser.find_element(*opener).click()  # a second click may close it, so it is given time
            return _wait(f"entry {text!r}", press, 10)

        _wait(f"list of {text!r}", open_and_press, 120)

    def shows(self, text: str) -> None:
        _wait(f"text {text!r}", lambda: text in self.browser.find_element(By.TAG_NAME, "body").text)

    def query(self, text: str) -> dict[str, Any]:
        body = json.dumps({"query": text}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["data"]


@pytest.fixture(scope="module")
def page(tmp_path_factory, chromium):
    folder = tmp_path_factory.mktemp("page")
    specs = folder / "specs"
    write_spec(
        specs,
        "suites",
        "page_suite",
        'extends = "coop_tiny_shared"\nparams = {train = 24, heldout = 24}\n',
    )
    write_spec(
        specs, "rollout_sets", "page_set", 'extends = "coop_tiny_shared_strong"\nsuite = "page_suite"\ntasks = "none"\n'
    )
    write_spec(specs, "experiments", "page", EXPERIMENT)
    port = free_port()
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(folder / "home"),
        "ETPI_DATA": str(folder / "data"),
        "PYTHONPATH": str(ROOT),
    }
    log = (folder / "dagster.log").open("w")
    # Not in the checkout, whose .env would name the user's own home. Dagster's processes read `specs` in this folder.
    server = subprocess.Popen(
        [sys.executable, "-m", "etpi", "ui", "--port", str(port)],
        cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    browser = None
    try:
        address = f"http://127.0.0.1:{port}"
        _wait("dagster dev", lambda: urllib.request.urlopen(f"{address}/server_info", timeout=2).status == 200, 120)
        options = selenium.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--window-size=1500,1000",
            RESOLVES_HERE,
        ):
            options.add_argument(argument)
        browser = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
        yield Page(address, browser)
    finally:
        if browser is not None:
            browser.quit()
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        log.close()


_RUNS = "{ runsOrError(limit: 20) { ... on Runs { results { runId jobName status } } } }"
_PARTITIONS = """{ assetNodeOrError(assetKey: {path: ["tito_pairs"]}) { ... on AssetNode { partitionKeys } } }"""
_EVENTS = """{ assetOrError(assetKey: {path: ["%s"]}) { ... on Asset {
  assetMaterializations(limit: 1, partitions: ["%s"]) { runId }
} } }"""


def test_run_experiment_from_its_job_page_makes_the_whole_chain(page):
    page.open("/locations/etpi/jobs/run_experiment")
    page.button("Materialize all")
    page.button("Confirm")  # Dagster does not know that the first asset computes the missing inputs
    page.choose("page", (By.XPATH, "//*[contains(text(), 'Select a partition')]"))
    page.browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    page.button("Launch 1 run")

    def finished() -> Any:
        new = page.query(_RUNS)["runsOrError"]["results"]
        return new[0] if new and new[0]["status"] in ("SUCCESS", "FAILURE", "CANCELED") else None

    run = _wait("run", finished, 480)
    assert run["status"] == "SUCCESS"
    for asset, partition in (("tasks", "page_suite"), ("scored_rollouts", "page_set"), ("tito_pairs", "page")):
        events = page.query(_EVENTS % (asset, partition))["assetOrError"]["assetMaterializations"]
        assert events[0]["runId"] == run["runId"], asset


def test_runs_are_in_the_timeline(page):
    page.open("/overview/timeline")
    page.shows("run_experiment")


def test_page_offers_the_demo_and_the_users_own_experiments(page):
    keys = page.query(_PARTITIONS)["assetNodeOrError"]["partitionKeys"]
    assert keys == ["page", "plan_first_tiny", "plan_first_tiny_weak"]


def test_asset_page_shows_its_tables(page):
    page.open("/assets/tito_pairs")
    for text in ("Token-in/token-out pairs", "Row count", "output_ids", "the ids to train on", "curation"):
        page.shows(text)


def test_hostile_website_changes_nothing_and_reads_nothing(page):
    def paused() -> bool:
        return page.query("{ instance { autoMaterializePaused } }")["instance"]["autoMaterializePaused"]

    before = paused()
    mutation = f"mutation {{ setAutoMaterializePaused(paused: {json.dumps(not before)}) }}"
    port = page.address.rpartition(":")[2]
    with hostile_page() as website:
        for host in ("127.0.0.1", "localhost", NAME):  # the last one: a name of the website's that leads here
            outcome = attack(page.browser, website.url, f"http://{host}:{port}", mutation)
            assert outcome["read"] == outcome["json"] == outcome["socket"] == "refused", host
            assert "Dagster" not in outcome["frame"]
            assert paused() == before, host
        page.browser.get(f"http://{NAME}:{port}/")
        assert "host name" in page.browser.find_element(By.TAG_NAME, "body").text
    page.query(mutation)
    assert paused() != before, "the mutation works for a user"
    page.query(f"mutation {{ setAutoMaterializePaused(paused: {json.dumps(before)}) }}")
