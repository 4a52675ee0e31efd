// What the pages do beyond plain forms: fresh figures, relative times, copying, a key for the search.
// Strategy: it only ever sets textContent, and adds nothing that a page needs. Polling stops while the tab is hidden or paused.
"use strict";

const NEWS_MS = 3000;
const ANSWER_MS = 10000;
const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

function duration(seconds) {
  for (const [unit, name, smaller, smallerName] of UNITS) {
    if (seconds >= unit) {
      const rest = Math.floor((seconds % unit) / smaller);
      return `${Math.floor(seconds / unit)} ${name}` + (rest ? ` ${rest} ${smallerName}` : "");
    }
  }
  return `${Math.floor(seconds)} s`;
}

function ago(microseconds) {
  if (!microseconds) return "–";
  const seconds = Date.now() / 1000 - Number(BigInt(microseconds) / 1000n) / 1000;
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
}

function moveTo(time, microseconds) {
  time.dataset.ago = microseconds;
  time.dateTime = time.title = microseconds && new Date(Number(BigInt(microseconds) / 1000n)).toISOString();
  time.textContent = ago(microseconds);
}

function keepTimes() {
  // Only while the clocks of the server and of this machine agree: otherwise the server's own words stay.
  const served = document.querySelector(".as-of time");
  if (!served || Math.abs(Date.now() - Date.parse(served.dateTime)) > 60000) return;
  setInterval(() => {
    if (document.hidden) return;
    for (const each of document.querySelectorAll("time[data-ago]")) each.textContent = ago(each.dataset.ago);
  }, 1000);
}

function isTyping(element) {
  return /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName);
}

function follow(path) {
  const pause = document.querySelector("[data-pause]");
  let paused = false;
  let looking = false;
  let tag = null;
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
  });
  const ask = async () => {
    const headers = { accept: "application/json" };
    if (tag) headers["if-none-match"] = tag;
    let news = null;
    let trouble = "";
    try {
      const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
      if (answer.status === 401) return stop("Signed out: load the page again");
      // Of a proxy, whose pages are no JSON, it may be a passing one.
      if (answer.status === 404 && answer.headers.get("content-type") === headers.accept) return stop("Not there any more");
      if (answer.ok || answer.status === 304) asOf(answer.headers.get("as-of"));
      if (answer.ok) {
        news = await answer.json();
        tag = answer.headers.get("etag");
      } else if (answer.status !== 304) {
        trouble = `The server answers with error ${answer.status}`;
      }
    } catch {
      trouble = "The server does not answer";
    }
    document.body.classList.toggle("stale", trouble !== "");
    if (!paused) pause.textContent = trouble || "Pause";
    if (news) show(news);
  };
  const look = async () => {
    // One at a time: the answer of a slow server or proxy must not come after a newer one.
    if (document.hidden || paused || looking) return;
    looking = true;
    await ask();
    looking = false;
  };
  const asOf = (at) => {
    if (!at) return;
    const served = document.querySelector(".as-of time");
    served.dateTime = served.title = at;
    served.textContent = at.slice(11, 23);
  };
  const show = ({ cells, over }) => {
    const field = document.activeElement;
    if (over && !(isTyping(field) && field.value !== field.defaultValue)) return location.reload();
    for (const each of document.querySelectorAll("[data-live]")) {
      const text = cells[each.dataset.live];
      if (text === undefined || text === (each.dataset.ago ?? each.textContent)) continue;
      if (each.dataset.ago !== undefined) moveTo(each, text);
      else each.textContent = text;
      each.classList.add("fresh");
      setTimeout(() => each.classList.remove("fresh"), 800);
    }
  };
  const timer = setInterval(look, NEWS_MS);
  const stop = (words) => {
    clearInterval(timer);
    pause.textContent = words;
    pause.disabled = true;
  };
}

function copy(button) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      // No clipboard without a secure context: select it instead.
      const shown = document.querySelector("h1 .id");
      const range = document.createRange();
      range.selectNodeContents(shown);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      button.textContent = "Selected: copy it";
    }
  });
}

// Every step of the slider is a row of the table beside it: the words of that row are shown.
function slide(form) {
  const range = form.querySelector("[type=range]");
  form.querySelector("button").hidden = true;
  range.addEventListener("input", () => {
    const row = document.querySelector(`tr[data-step="${range.valueAsNumber}"]`);
    for (const each of document.querySelectorAll("[data-of]")) {
      each.textContent = row.querySelector(`[data-cell="${each.dataset.of}"]`).textContent;
    }
    for (const each of document.querySelectorAll("[data-moves]")) each.setAttribute("transform", `translate(${row.dataset.x} 0)`);
    for (const each of document.querySelectorAll("input[data-typed]")) each.value = row.dataset.typed;
    range.setAttribute("aria-valuetext", row.querySelector("[data-cell=timeout]").textContent);
    const address = new URL(location.href);
    address.searchParams.set("step", range.value);
    history.replaceState(null, "", address);
  });
}

document.addEventListener("DOMContentLoaded", () => {
  if (document.body.dataset.news) follow(document.body.dataset.news);
  keepTimes();
  document.querySelectorAll("[data-copy]").forEach(copy);
  document.querySelectorAll("[data-slider]").forEach(slide);
  const search = document.querySelector("[data-key='/']");
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && search && !isTyping(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
    }
  });
});
