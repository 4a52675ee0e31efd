/* The lease simulator of lease-simulator.md: what a visibility timeout costs in duplicate work and in waiting after a crash.

   A message is received at once when it is visible; each attempt works for a time that is drawn, and its worker crashes at a
   constant rate while it works. Without extension a lease lasts `timeout` seconds; with it the lease is set to `timeout`
   again every `every` seconds for as long as the worker lives. An attempt that outlives its lease works on, but its delete is
   refused, for somebody else has the message by then. After `receivesMax` receives a message is a dead letter.

   `simulate` is pure, and the same seed gives the same numbers: tests/house/test_site.py compares them with closed forms. */
"use strict";

const leaseSimulator = (() => {
  const LAWS = {
    fixed: (median) => () => median,
    exponential: (median, draw) => () => (-Math.log(1 - draw()) * median) / Math.LN2,
    lognormal: (median, draw) => () => median * Math.exp(normal(draw)),
    pareto: (median, draw) => () => (median / Math.pow(2, 1 / 1.5)) * Math.pow(1 - draw(), -1 / 1.5),
  };
  const DEFAULTS = {
    messages: 5000, timeout: 30, extend: false, every: 15, law: "lognormal", median: 20, anew: false, crashesPerHour: 1,
    receivesMax: 10, seed: 1,
  };

  /* mulberry32: from 0 up to, but not including, 1 */
  function generator(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let mixed = Math.imul(state ^ (state >>> 15), state | 1);
      mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
      return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
    };
  }

  function normal(draw) {
    return Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
  }

  /* When the lease of an attempt ends that begins at 0 and is alive until `alive`. */
  function leaseEnd(given, alive) {
    return given.extend ? Math.floor(alive / given.every) * given.every + given.timeout : given.timeout;
  }

  /* One message: its attempts [{start, work, crash, lease}] in seconds, and how it ended. */
  function life(given, work, crashAfter) {
    const attempts = [];
    let start = 0;
    let takes = work();
    while (attempts.length < given.receivesMax) {
      if (attempts.length && given.anew) takes = work();
      const crash = crashAfter();
      const crashed = crash < takes;
      const lease = leaseEnd(given, crashed ? crash : takes);
      attempts.push({ start, work: crashed ? crash : takes, crashed, lease });
      if (!crashed && takes <= lease) return { attempts, done: start + takes };
      start += lease;
    }
    return { attempts, done: null };
  }

  function simulate(parameters) {
    const given = { ...DEFAULTS, ...parameters };
    const draw = generator(given.seed);
    const work = LAWS[given.law](given.median, draw);
    const rate = given.crashesPerHour / 3600;
    const crashAfter = () => (rate > 0 ? -Math.log(1 - draw()) / rate : Infinity);
    const recoveries = [];
    const times = [];
    const lives = [];
    let receives = 0, duplicates = 0, dead = 0, extensions = 0, wasted = 0;
    for (let number = 0; number < given.messages; number += 1) {
      const one = life(given, work, crashAfter);
      if (lives.length < 12) lives.push(one);
      receives += one.attempts.length;
      if (one.done === null) dead += 1;
      else times.push(one.done);
      for (const [place, attempt] of one.attempts.entries()) {
        const isLast = place === one.attempts.length - 1;
        if (given.extend) extensions += Math.floor(attempt.work / given.every);
        if (attempt.crashed) {
          if (!isLast) recoveries.push(Math.max(0, attempt.lease - attempt.work));
        } else if (attempt.work > attempt.lease) {
          wasted += attempt.work;
          if (!isLast) duplicates += 1;
        }
      }
    }
    return {
      receives: receives / given.messages, duplicates: (100 * duplicates) / given.messages, dead: (100 * dead) / given.messages,
      recovery: summary(recoveries), time: summary(times), extensions: extensions / given.messages,
      wasted: wasted / given.messages, lives,
    };
  }

  function summary(values) {
    if (!values.length) return { count: 0, mean: 0, p95: 0, max: 0 };
    const sorted = [...values].sort((a, b) => a - b);
    const mean = sorted.reduce((sum, value) => sum + value, 0) / sorted.length;
    return { count: sorted.length, mean, p95: sorted[Math.floor(0.95 * (sorted.length - 1))], max: sorted[sorted.length - 1] };
  }

  /* The same work under timeouts from 1 s to 6 h. */
  function sweep(parameters) {
    const points = [];
    for (let step = 0; step <= 24; step += 1) {
      const timeout = Math.pow(21600, step / 24);
      const found = simulate({ ...parameters, timeout, every: timeout / 2, messages: 1000 });
      points.push({ timeout, duplicates: found.duplicates, recovery: found.recovery.mean });
    }
    return points;
  }

  return { simulate, sweep, life, DEFAULTS, LAWS };
})();

/* The page */
(() => {
  const place = typeof document === "undefined" ? null : document.getElementById("simulator");
  if (!place) return;
  const COLOURS = { work: "#3b7dd8", wasted: "#c62828", lease: "#f0b040", good: "#2e8b57" };
  const FIELDS = [
    ["timeout", "Visibility timeout, s", { type: "number", min: 1, max: 43200 }],
    ["extend", "Extended while the worker lives", { type: "checkbox" }],
    ["every", "Extended every, s", { type: "number", min: 1, max: 43200 }],
    ["law", "Processing time", ["fixed", "exponential", "lognormal", "pareto"]],
    ["median", "Median processing time, s", { type: "number", min: 0.1, max: 43200, step: "any" }],
    ["anew", "Each attempt takes another time", { type: "checkbox" }],
    ["crashesPerHour", "Crashes in an hour of work", { type: "number", min: 0, max: 3600, step: "any" }],
    ["receivesMax", "Receives before it is a dead letter", { type: "number", min: 1, max: 1000 }],
  ];

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawn(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function canvas(height, title) {
    const svg = drawn("svg", { viewBox: `0 0 760 ${height}`, width: "100%", role: "img", "font-size": 12, fill: "currentColor" });
    svg.append(drawn("title", {}, title));
    return svg;
  }

  function seconds(value) {
    if (value >= 7200) return `${(value / 3600).toFixed(1)} h`;
    if (value >= 120) return `${(value / 60).toFixed(1)} min`;
    return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} s`;
  }

  function timeline(lives) {
    const shown = lives.map((one) => one.attempts.slice(0, 6));
    const end = Math.max(...shown.map((attempts) => Math.max(...attempts.map((each) => each.start + Math.max(each.work, each.lease)))));
    const svg = canvas(20 + 26 * shown.length, "Twelve messages: work above, leases below");
    const at = (value) => 8 + (740 * value) / end;
    for (const [row, attempts] of shown.entries()) {
      const top = 8 + 26 * row;
      for (const each of attempts) {
        const late = !each.crashed && each.work > each.lease;
        const from = at(each.start), to = at(each.start + each.work);
        svg.append(drawn("rect", { x: from, y: top, width: Math.max(1, to - from), height: 9, fill: late ? COLOURS.wasted : COLOURS.work, opacity: 0.75 }));
        const lease = each.crashed || late ? each.lease : Math.min(each.lease, each.work);
        svg.append(drawn("rect", { x: from, y: top + 11, width: Math.max(1, at(each.start + lease) - from), height: 5, fill: COLOURS.lease }));
        if (each.crashed) svg.append(drawn("path", { d: `M${to - 4} ${top}l8 9m0-9l-8 9`, stroke: COLOURS.wasted, "stroke-width": 2, fill: "none" }));
      }
    }
    svg.append(drawn("text", { x: 8, y: 16 + 26 * shown.length }, "0"), drawn("text", { x: 752, y: 16 + 26 * shown.length, "text-anchor": "end" }, seconds(end)));
    return svg;
  }

  function curve(points, timeout) {
    const svg = canvas(220, "Duplicates and recovery delay by visibility timeout");
    const at = (value) => 50 + (660 * Math.log(value)) / Math.log(21600);
    const high = Math.max(1, ...points.map((each) => each.recovery));
    const most = Math.max(1, ...points.map((each) => each.duplicates));
    const line = (key, scale, colour) => svg.append(drawn("polyline", {
      points: points.map((each) => `${at(each.timeout).toFixed(1)},${(180 - (160 * each[key]) / scale).toFixed(1)}`).join(" "),
      fill: "none", stroke: colour, "stroke-width": 2,
    }));
    line("duplicates", most, COLOURS.wasted);
    line("recovery", high, COLOURS.good);
    for (const tick of [1, 10, 60, 600, 3600, 21600]) svg.append(drawn("text", { x: at(tick), y: 198, "text-anchor": "middle" }, seconds(tick)));
    const now = at(Math.min(21600, Math.max(1, timeout)));
    svg.append(
      drawn("line", { x1: now, x2: now, y1: 14, y2: 180, stroke: "currentColor", "stroke-dasharray": "4 3" }),
      drawn("text", { x: 50, y: 216, fill: COLOURS.wasted }, `duplicates, up to ${most.toFixed(0)} in 100 messages`),
      drawn("text", { x: 710, y: 216, fill: COLOURS.good, "text-anchor": "end" }, `mean recovery delay, up to ${seconds(high)}`),
    );
    return svg;
  }

  const form = element("form", { style: "display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:.4rem 1.5rem" });
  const inputs = {};
  for (const [name, label, kind] of FIELDS) {
    const id = `simulator-${name}`;
    const value = leaseSimulator.DEFAULTS[name];
    inputs[name] = Array.isArray(kind) ? element("select", { id }, ...kind.map((each) => element("option", {}, each))) : element("input", { id, ...kind });
    if (kind.type === "checkbox") inputs[name].checked = value;
    else inputs[name].value = value;
    inputs[name].style.cssText = "border:1px solid;padding:0 .3rem;width:7rem;height:1.8rem;appearance:auto";
    form.append(element("label", { for: id, style: "display:flex;align-items:center;justify-content:space-between;gap:.5rem" }, label, inputs[name]));
  }
  const results = element("div", { "aria-live": "polite" });
  place.append(form, results);

  function parameters() {
    const found = {};
    for (const [name, , kind] of FIELDS) {
      const input = inputs[name];
      found[name] = kind.type === "checkbox" ? input.checked : kind.type === "number" ? Math.max(Number(kind.min), Number(input.value) || 0) : input.value;
    }
    return found;
  }

  function show() {
    const given = parameters();
    inputs.every.disabled = !given.extend;
    const found = leaseSimulator.simulate(given);
    const rows = [
      ["Started again while the first worker still worked", `${found.duplicates.toFixed(1)} in 100 messages`],
      ["Recovery delay after a crash: mean, 95 %, longest", found.recovery.count ? [found.recovery.mean, found.recovery.p95, found.recovery.max].map(seconds).join(", ") : "no crash"],
      ["From first receive to the delete: mean, 95 %", [found.time.mean, found.time.p95].map(seconds).join(", ")],
      ["Receives of a message", found.receives.toFixed(2)],
      ["Extensions of a message", found.extensions.toFixed(2)],
      ["Work whose delete was refused, a message", seconds(found.wasted)],
      ["Dead letters", `${found.dead.toFixed(1)} in 100 messages`],
    ];
    results.replaceChildren(
      element("table", {}, element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value))))),
      timeline(found.lives),
      curve(leaseSimulator.sweep(given), given.timeout),
    );
  }

  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();

if (typeof module !== "undefined") module.exports = leaseSimulator;
