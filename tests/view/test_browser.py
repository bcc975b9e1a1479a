"""The pages in a real browser: from the overview to the tokens of a turn by clicks, at two widths."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import viewed_lake
from tests.support.hostile_page import NAME, RESOLVES_HERE, attack, hostile_page
from tests.support.viewed_lake import NAMES, SET, STUDY
from tests.support.waiting import until
from tests.support.web_server import free_port

selenium = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support import wait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (.ci/run installs them)"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`etpi view` as a process of its own."""
    root = tmp_path_factory.mktemp("browser")
    lake = viewed_lake.make(root / "data")
    viewed_lake.put_blame(lake)
    viewed_lake.build(lake, root / "etpi.duckdb")
    port = free_port()
    environment = {**os.environ, "ETPI_DATA": str(root / "data"), "ETPI_CATALOG": str(root / "etpi.duckdb")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    line = [sys.executable, "-m", "etpi", "view", "--port", str(port)]
    server = subprocess.Popen(line, cwd=root, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: urllib.request.urlopen(url, timeout=5), ignored=(urllib.error.URLError, ConnectionError)).close()
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1600,1000",
        RESOLVES_HERE,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    try:
        yield opened
    finally:
        opened.quit()


def test_clicks_lead_from_the_overview_to_the_tokens(address: str, browser: Any) -> None:
    def click(selector: str) -> str:
        before = browser.current_url
        browser.find_element(By.CSS_SELECTOR, selector).click()
        wait.WebDriverWait(browser, 20).until(lambda opened: opened.current_url != before)
        return browser.find_element(By.TAG_NAME, "h1").text

    browser.get(address)
    assert click(f"a[href='/experiment/{STUDY}']").startswith("A study <script>")
    assert click(f"a[href='/regressions/{STUDY}']") == "Regressions"
    assert click(f"a[href$='{NAMES['student']}']") == "t2"
    first, second = browser.find_elements(By.CSS_SELECTOR, ".round .turn")[:2]
    assert abs(first.rect["y"] - second.rect["y"]) < 2 < second.rect["x"] - first.rect["x"], "agents side by side"
    assert click("#agent1-1 .to-tokens") == "Turn 1 of agent1 as tokens"
    token = browser.find_element(By.CSS_SELECTOR, ".tokens.output .t:nth-child(3)")
    assert token.get_attribute("title").startswith("id 40, position 10, logprob -5")
    assert token.value_of_css_property("background-color") == "rgba(201, 95, 43, 1)"
    assert click("a[href*='shade=entropy']").startswith("Turn 1")
    assert "entropy: not recorded" in browser.find_element(By.TAG_NAME, "main").text
    refused = [line for line in browser.get_log("browser") if "Content Security Policy" in line["message"]]
    assert refused == []


def test_influence_leads_from_the_data_set_to_shaded_tokens_and_the_rollout(address: str, browser: Any) -> None:
    browser.get(f"{address}/dataset/{STUDY}")
    for selector in ("a[href*='sort=influence']", "td.name a[href*='/sequence/']"):
        browser.find_element(By.CSS_SELECTOR, selector).click()
    wait.WebDriverWait(browser, 20).until(lambda opened: "/sequence/" in opened.current_url)
    shaded = browser.find_elements(By.CSS_SELECTOR, ".node .t.b1, .node .t.b4, .node .t.r4")
    colours = [token.value_of_css_property("background-color") for token in shaded]
    blue, dark_blue, red = "rgba(227, 238, 248, 1)", "rgba(74, 139, 196, 1)", "rgba(224, 106, 84, 1)"
    assert colours == [blue, dark_blue, red]
    browser.get(f"{address}/rollout/set/{SET}/{NAMES['teacher']}")
    assert "raised solved" in browser.find_element(By.TAG_NAME, "main").text
    browser.find_element(By.CSS_SELECTOR, "a[href*='shade=influence']").click()
    wait.WebDriverWait(browser, 20).until(lambda opened: "shade=influence" in opened.current_url)
    token = browser.find_element(By.CSS_SELECTOR, ".tokens.output .t.r4, .tokens .t.r4")
    assert "influence -2" in token.get_attribute("title")


def test_form_finds_rollouts(address: str, browser: Any) -> None:
    browser.get(f"{address}/rollouts")
    browser.find_element(By.NAME, "text").send_keys("answer words")
    browser.find_element(By.CSS_SELECTOR, "select[name=verdict] option[value=failed_tests]").click()
    browser.find_element(By.CSS_SELECTOR, "form button").click()
    wait.WebDriverWait(browser, 20).until(lambda opened: "text=answer+words" in opened.current_url)
    assert "verdict=failed_tests" in browser.current_url
    assert len(browser.find_elements(By.TAG_NAME, "mark")) == 2


def test_keys_move_along_rows_and_turns(address: str, browser: Any) -> None:
    def press(keys: str) -> None:
        browser.find_element(By.TAG_NAME, "body").send_keys(keys)

    for path in (f"/regressions/{STUDY}", f"/dataset/{STUDY}", "/rollouts?sort=task"):
        browser.get(f"{address}{path}")
        press("jjk")
        assert len(browser.find_elements(By.CSS_SELECTOR, "tr.at")) == 1, path
    press(Keys.ENTER)
    wait.WebDriverWait(browser, 20).until(lambda opened: "/rollout/" in opened.current_url)
    press("jj")
    assert browser.find_element(By.CSS_SELECTOR, "article.at").get_attribute("id").startswith("agent")
    browser.get(f"{address}/rollout/set/{SET}/{NAMES['teacher']}")
    press("n")
    wait.WebDriverWait(browser, 20).until(lambda opened: opened.current_url.endswith(NAMES["dropped"]))
    press("p")
    wait.WebDriverWait(browser, 20).until(lambda opened: opened.current_url.endswith(NAMES["teacher"]))
    browser.get(f"{address}/rollouts")
    press("/")
    assert browser.switch_to.active_element.get_attribute("name") == "text"
    browser.switch_to.active_element.send_keys("jn")
    assert browser.switch_to.active_element.get_attribute("value") == "jn", "keys are letters in a field"


def test_narrow_page_stacks_agents_and_does_not_scroll_sideways(address: str, browser: Any) -> None:
    browser.set_window_size(800, 1000)
    try:
        for page in (f"/rollout/eval/{STUDY}/{NAMES['student']}", "/", f"/experiment/{STUDY}", "/rollouts", "/live",
                     f"/dataset/{STUDY}"):  # fmt: skip
            browser.get(address + page)
            width = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
            assert width <= 0, page
        browser.get(f"{address}/rollout/eval/{STUDY}/{NAMES['student']}")
        first, second = browser.find_elements(By.CSS_SELECTOR, ".round .turn")[:2]
        assert first.rect["x"] == second.rect["x"] and first.rect["y"] < second.rect["y"]
    finally:
        browser.set_window_size(1600, 1000)


def test_hostile_website_reads_nothing(address: str, browser: Any) -> None:
    port = address.rpartition(":")[2]
    with hostile_page() as website:
        for host in ("127.0.0.1", "localhost", NAME):
            outcome = attack(browser, website.url, f"http://{host}:{port}", "{ x }")
            assert outcome["read"] == outcome["json"] == outcome["socket"] == "refused", host
            assert STUDY not in outcome["frame"]
        browser.get(f"http://{NAME}:{port}/")
        assert "host name" in browser.find_element(By.TAG_NAME, "body").text


DIM = """
const light = text => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(value => value / 255)
    .map(value => value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = node => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
  return getComputedStyle(document.documentElement).colorScheme.includes("dark") ? "rgb(0,0,0)" : "rgb(255,255,255)";
};
const dim = new Set();
for (const node of document.querySelectorAll("body *")) {
  if (node.closest("svg, option") || !node.checkVisibility()) continue;
  if (![...node.childNodes].some(child => child.nodeType == 3 && child.data.trim())) continue;
  const [a, b] = [getComputedStyle(node).color, behind(node)].map(light).sort((one, other) => one - other);
  if ((b + .05) / (a + .05) < 3) dim.add(node.outerHTML.slice(0, 120));
}
return [...dim];
"""
"""Elements whose text has a contrast of less than 3 to what is behind it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 800])
def test_pages_can_be_read_in_both_schemes_and_are_no_wider_than_the_window(
    address: str, browser: Any, scheme: str, width: int
) -> None:
    teacher = f"/rollout/set/{SET}/{NAMES['teacher']}"
    pages = ["/", f"/experiment/{STUDY}", f"/regressions/{STUDY}?all=1", f"/task/{STUDY}?task=t2", "/rollouts", teacher]
    pages += [f"{teacher}/tokens?agent=agent1&turn=1&shade={shade}" for shade in ("logprob", "weight", "label")]
    pages += [f"/dataset/{STUDY}", f"/dataset/{STUDY}/sequence/seq1", f"/curves?experiment={STUDY}", "/live", "/none"]
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for page in pages:
            browser.get(f"{address}{page}")
            assert browser.execute_script(DIM) == [], page
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
