// Keys: j and k move along rows or turns, Enter opens a row, n and p follow the next and previous link, / searches.
const items = [...document.querySelectorAll("table.list tbody tr:not(.snippet), article.turn")];
let at = -1;
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const relation = { n: "next", p: "prev" }[event.key], step = { j: 1, k: -1 }[event.key];
  if (relation) document.querySelector(`a[rel=${relation}]`)?.click();
  else if (step && items.length) {
    items[at]?.classList.remove("at");
    at = Math.min(Math.max(at + step, 0), items.length - 1);
    items[at].classList.add("at");
    items[at].scrollIntoView({ block: "nearest" });
  } else if (event.key == "Enter" && event.target.tagName != "A") items[at]?.querySelector("a")?.click();
  else if (event.key == "/") {
    const field = document.querySelector(".text input");
    if (field) { event.preventDefault(); field.focus(); } else location.href = "/rollouts";
  }
});
// A long prompt opens at its end, where the turn's own words are.
for (const prompt of document.querySelectorAll("details.prompt"))
  prompt.addEventListener("toggle", () => { const text = prompt.lastElementChild; text.scrollTop = text.scrollHeight; });
for (const ids of document.querySelectorAll(".tokens.prompt")) ids.scrollTop = ids.scrollHeight;
