"""A hostile website for tests in a browser: its page sends requests to a server of this machine, as any page could."""

from __future__ import annotations

import json
from typing import Any

from tests.support.web_server import WebServer

NAME = "evil.example"
RESOLVES_HERE = f"--host-resolver-rules=MAP {NAME} 127.0.0.1"
"""The browser's argument after which the name leads to this machine, as after DNS rebinding."""

_ATTACKS = """
const [target, query, done] = arguments;
const body = JSON.stringify({query}), url = target + "/graphql", outcome = {};
const seen = (name, promise) => promise.then(text => outcome[name] = text, error => outcome[name] = "refused");
const send = (name, options, address = url) =>
  seen(name, fetch(address, options).then(async answer => answer.type == "opaque" ? "opaque" : await answer.text()));
const text = {"Content-Type": "text/plain;application/json"};
const socket = new Promise((resolve, reject) => {
  const open = new WebSocket(url.replace("http", "ws"), "graphql-ws");
  open.onopen = () => {
    open.send(JSON.stringify({type: "connection_init"}));
    open.send(JSON.stringify({type: "start", id: "1", payload: {query}}));
  };
  open.onmessage = message => resolve(message.data);
  open.onerror = reject;
});
const framed = new Promise(resolve => {
  const frame = document.createElement("iframe");
  frame.onload = () => { try { resolve(frame.contentDocument.body.innerText); } catch { resolve(""); } };
  frame.src = target + "/";
  document.body.append(frame);
});
const form = document.createElement("form");
const byGet = url + "?query=" + encodeURIComponent(query);
Object.assign(form, {method: "POST", action: byGet, enctype: "text/plain", target: "sink"});
document.body.append(Object.assign(document.createElement("iframe"), {name: "sink"}), form);
form.submit();
new Image().src = byGet;
Promise.all([
  send("read", {credentials: "include"}, target + "/"),
  send("get", {mode: "no-cors", credentials: "include"}, byGet),
  send("text", {method: "POST", mode: "no-cors", credentials: "include", headers: text, body}),
  send("json", {method: "POST", credentials: "include", headers: {"Content-Type": "application/json"}, body}),
  seen("socket", socket), seen("frame", framed),
]).then(() => setTimeout(() => done(outcome), 1500));
"""


def hostile_page() -> WebServer:
    """Return the server of the hostile website, whose `url` has NAME."""
    page = b"<!doctype html><title>hostile</title><body></body>"
    server = WebServer(lambda handler: handler.reply(200, page, **{"content-type": "text/html"}))
    server.url = f"http://{NAME}:{server.port}"
    return server


def attack(browser: Any, website: str, target: str, query: str) -> dict[str, str]:
    """Open the website and have it send `query` to a server in every way that a page has.

    Returns:
        Way -> text that the page could read, "opaque" if it was sent and the page cannot read the response, or
        "refused".
    """
    browser.set_script_timeout(60)
    browser.get(website)
    return json.loads(json.dumps(browser.execute_async_script(_ATTACKS, target, query)))
