"use strict";
// Draws a section's charts when it is opened, in the reader's light or dark, at the width there is.
const QUANTILES = [0.5, 0.9, 0.99];
const PARTS = ["client", "queue", "prefill", "transfer", "admission", "return"];
const PART_INKS = ["base", "prfaas", "pd", "sending", "admitting", "fourth"];
const ARM_INKS = ["base", "cand", "third", "fourth"], ARM_DASH = ["dash", "solid", "dot", "dashdot"];
const QUEUES = [["waiting_pd", "waits for prefill, pd", "pd"], ["waiting_prfaas", "waits for prefill, prfaas", "prfaas"],
  ["sending", "KV on its way", "sending"], ["admitting", "waits for a slot", "admitting"]];
const ROLES = [["prefill, prfaas", "prfaas"], ["prefill, pd", "pd"], ["decode, pd", "sending"]];
const TICKS = [-2, -1, 0, 1, 2, 3].flatMap(power => [1, 3].map(one => +(one * 10 ** power).toPrecision(1)));
const NARROW = matchMedia("(max-width: 760px)"), DARK = matchMedia("(prefers-color-scheme: dark)"), PANEL = 150, TOP = 8, BOTTOM = 44;

const narrow = () => NARROW.matches;
const ink = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const escaped = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const tidy = value => value === null || value === undefined ? "–"
  : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
const short = text => text.length > 34 ? text.slice(0, 33) + "…" : text;

function axis(more) {
  return { gridcolor: ink("grid"), linecolor: ink("edge"), zerolinecolor: ink("edge"), tickfont: { size: 11 }, automargin: true, ...more,
    title: { text: more.title || "", font: { size: 12 }, standoff: 6 } };
}
function layout(height, more) {
  return { height, margin: { l: 52, r: 14, t: TOP, b: BOTTOM }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink("soft"), size: 12, family: "system-ui, sans-serif" }, hoverlabel: { bgcolor: ink("card"), bordercolor: ink("edge"), font: { color: ink("ink") } },
    showlegend: false, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hovermode: "x unified", ...more };
}
const armKeys = names => names.map((name, i) => ({ name, ink: ARM_INKS[i], dash: ARM_DASH[i] }));
// Of a distribution: the value that a share of all does not exceed.
function quantile(ttft, share) {
  const at = ttft.share.findIndex(one => one >= share);
  return at < 0 ? null : ttft.s[at];
}
// The last bin that ends at or before a time, by bisection.
function before(times, at) {
  let low = 0, high = times.length;
  while (low < high) { const mid = (low + high) >> 1; if (times[mid] <= at) low = mid + 1; else high = mid; }
  return Math.max(0, low - 1);
}

function distributionChart(names, charts) {
  const arms = charts.arms, all = arms.flatMap(arm => arm.ttft.s).filter(s => s > 0);
  if (!all.length) return null;
  const traces = arms.map((arm, i) => ({ x: arm.ttft.s, y: arm.ttft.share.map(one => one * 100), name: escaped(short(names[i])), mode: "lines",
    line: { shape: "hv", color: ink(ARM_INKS[i]), width: 2.2, dash: ARM_DASH[i] }, hovertemplate: "%{y:.3g} % within %{x:.3g} s" }));
  const shapes = [], annotations = [];
  if (charts.slo_s) {
    shapes.push({ type: "line", x0: charts.slo_s, x1: charts.slo_s, yref: "paper", y0: 0, y1: 1, line: { color: ink("slo"), width: 1, dash: "dot" } });
    annotations.push({ x: Math.log10(charts.slo_s), xref: "x", y: 4, text: `SLO ${tidy(charts.slo_s)} s`, showarrow: false, xanchor: "left", font: { size: 11, color: ink("slo") } });
  }
  return { title: "TTFT: how many requests wait no longer", traces, at: QUANTILES, keys: armKeys(names),
    layout: layout(300, { hovermode: "closest", shapes, annotations, xaxis: axis({ type: "log", title: "TTFT, s (logarithmic)", tickvals: TICKS, ticktext: TICKS.map(String) }), yaxis: axis({ title: "% of requests", range: [0, 101] }) }),
    say: share => `${share * 100} % of requests wait at most: ` + arms.map((arm, i) => `${names[i]} ${tidy(quantile(arm.ttft, share))} s`).join(", ") };
}

function partsChart(names, charts) {
  const rows = charts.arms.flatMap((arm, i) => [["all", arm.parts.all], ["slowest 10 %", arm.parts.slowest]].map(([which, parts]) => ({ i, which, parts })));
  const label = row => `${escaped(short(names[row.i]).split(" ")[0])}, ${row.which}`;
  const order = [...rows.filter(row => row.which !== "all"), ...rows.filter(row => row.which === "all")].reverse();
  const unique = order.map((row, at) => label(row) + "\u200b".repeat(at)); // bars of one name would be one bar
  const traces = PARTS.map((part, i) => ({ type: "bar", orientation: "h", name: part, y: unique, x: order.map(row => row.parts[part]),
    marker: { color: ink(PART_INKS[i]) }, hovertemplate: `${part} %{x:.3g} s<extra></extra>` }));
  return { title: "TTFT: its parts, means", traces, at: order, keys: PARTS.map((name, i) => ({ name, ink: PART_INKS[i], bar: true })),
    layout: layout(300, { barmode: "stack", hovermode: "closest", bargap: 0.35, xaxis: axis({ title: "s" }), yaxis: axis({}) }),
    say: row => `${names[row.i]}, ${row.which}: ` + PARTS.map(part => `${part} ${tidy(row.parts[part])}`).join(", ") + " s" };
}

function loadChart(names, charts) {
  const load = charts.load;
  if (!load) return null;
  const lines = [load.baseline_ttft_p90_s, load.candidate_ttft_p90_s];
  const traces = lines.map((y, i) => ({ x: load.rates_rps, y, name: escaped(short(names[i])), mode: "lines+markers", line: { color: ink(ARM_INKS[i]), dash: ARM_DASH[i], width: 2.2 },
    hovertemplate: "%{y:.3g} s" }));
  const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: load.slo_ttft_p90_s, y1: load.slo_ttft_p90_s, line: { color: ink("slo"), width: 1, dash: "dot" } }];
  const annotations = [{ xref: "paper", x: 0, xanchor: "left", y: Math.log10(load.slo_ttft_p90_s), yanchor: "bottom", text: `SLO ${tidy(load.slo_ttft_p90_s)} s`, showarrow: false, font: { size: 11, color: ink("slo") } }];
  return { title: "P90 TTFT against load, means over seeds", traces, at: load.rates_rps.map((_, i) => i), keys: armKeys(names),
    layout: layout(300, { shapes, annotations, xaxis: axis({ title: "offered, requests/s" }), yaxis: axis({ type: "log", title: "P90 TTFT, s" }) }),
    say: i => `at ${tidy(load.rates_rps[i])} requests/s: ` + lines.map((y, k) => `${names[k]} ${tidy(y[i])} s`).join(", ") };
}

function seedsChart(names, charts) {
  const rows = charts.differences;
  if (!rows || !rows.length || rows[0].seeds.length < 2) return null;
  const inks = ["cand", "third", "fourth", "pd"];
  const traces = rows.map((row, i) => ({ x: row.seeds.map((_, k) => k + 1), y: row.changes, name: escaped(row.name), mode: "markers",
    marker: { color: ink(inks[i % 4]), size: 7, symbol: ["circle", "diamond", "square", "cross"][i % 4] }, hovertemplate: "%{y:+.2g} × what counts" }));
  const shapes = [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: -1, y1: 1, fillcolor: ink("grid"), line: { width: 0 }, layer: "below" }];
  return { title: "Seed by seed: the change, in units of what counts", traces, at: rows[0].seeds.map((_, i) => i), keys: rows.map((row, i) => ({ name: row.name, ink: inks[i % 4], bar: true })),
    layout: layout(300, { shapes, xaxis: axis({ title: "seeds, in the order in which they were run" }), yaxis: axis({ title: "worse ← → better", zeroline: true }) }),
    say: i => `seed ${rows[0].seeds[i]}: ` + rows.map(row => `${row.name} ${tidy(row.changes[i])}`).join(", ") + " times what counts" };
}

// Panels over one axis of time: a column an arm, or one below the other where it is narrow.
function timeChart(names, charts) {
  const arms = charts.arms;
  const every = [
    { title: "link, Gbps", lines: [["applied_gbps", "link: applied", "base", "hv"], ["goodput_gbps", "link: KV that crossed", "cand", "hv"]] },
    { title: "threshold, K tokens", lines: [["optimum_k", "threshold: best of the closed form", "base", "hv", "dash"], ["threshold_k", "threshold in force", "third", "hv"]] },
    { title: "queues, requests", lines: QUEUES.map(([key, name, colour]) => [key, name, colour, "hv"]) },
    { title: "roles, instances", roles: true, lines: ROLES.map(([key, colour]) => [key, key, colour, "hv"]) },
  ];
  const known = panel => panel.lines.flatMap(([key]) => arms.flatMap(arm => (panel.roles ? arm.roles : arm.time)[key] || [])).filter(one => one !== null);
  const panels = every.filter(panel => known(panel).length);
  const highest = panel => known(panel).reduce((most, one) => Math.max(most, one), 0) || 1;
  const columns = narrow() ? 1 : arms.length, rows = panels.length * (narrow() ? arms.length : 1);
  const traces = [], more = {}, annotations = [], keys = [], gapX = 0.06, gapY = 0.12;
  const end = Math.max(...arms.map(arm => arm.time.t_s.at(-1) || 0));
  panels.forEach((panel, p) => arms.forEach((arm, a) => {
    const row = narrow() ? p * arms.length + a : p, column = narrow() ? 0 : a, index = p * arms.length + a + 1, id = index === 1 ? "" : index;
    const width = (1 - gapX * (columns - 1)) / columns, left = column * (width + gapX), last = row === rows - 1;
    const size = 1 / (rows + gapY * (rows - 1)), high = 1 - row * size * (1 + gapY), top = high - size * 0.14;
    more["xaxis" + id] = axis({ anchor: "y" + id, domain: [left, left + width], range: [0, end], showticklabels: last, title: last ? "model seconds" : "", ...(index > 1 && { matches: "x" }) });
    more["yaxis" + id] = axis({ anchor: "x" + id, domain: [Math.max(0, high - size), top], range: [0, highest(panel) * 1.06], nticks: 5 });
    annotations.push({ xref: "paper", yref: "paper", x: left, y: top, xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 12, color: ink("ink") },
      text: `${panel.title} · ${escaped(short(names[a]))}` });
    for (const [key, name, colour, shape, dash] of panel.lines) {
      const from = panel.roles ? arm.roles : arm.time;
      if (!from[key] || !from[key].some(one => one !== null)) continue;
      traces.push({ x: from.t_s, y: from[key], name, mode: "lines", xaxis: "x" + id, yaxis: "y" + id,
        line: { shape: panel.roles ? "hv" : "vh", color: ink(colour), width: 1.6, dash: dash || "solid" }, hovertemplate: "%{y:.4g}" });
      if (!keys.some(one => one.name === name)) keys.push({ name, ink: colour, dash });
    }
  }));
  const steps = Array.from({ length: 61 }, (_, i) => end * i / 60);
  const events = arms.flatMap((arm, a) => arm.events.map(one => ({ ...one, arm: names[a] })));
  return { title: "Over time: link, threshold, queues, roles", wide: true, traces, at: steps,
    layout: layout(BOTTOM + rows * PANEL, { ...more, annotations, margin: { l: 46, r: 10, t: 4, b: BOTTOM } }), keys,
    cursor: at => Object.keys(more).filter(key => key.startsWith("xaxis")).map(key => ({ type: "line", xref: key.replace("axis", ""), yref: key.replace("xaxis", "y") + " domain", x0: at, x1: at, y0: 0, y1: 1, line: { color: ink("focus"), width: 1 } })),
    say: at => `at ${tidy(at)} s: ` + arms.map((arm, a) => {
      const bin = before(arm.time.t_s, at), told = [["applied_gbps", "link", "Gbps"], ["threshold_k", "threshold", "K tokens"], ["waiting_pd", "waiting for pd", ""], ["waiting_prfaas", "for prfaas", ""]];
      return `${names[a]}: ` + told.map(([key, name, unit]) => `${name} ${tidy(arm.time[key][bin])} ${unit}`.trim()).join(", ");
    }).join("; "),
    events };
}

function draw(section) {
  const data = JSON.parse(section.querySelector("script").textContent), host = section.querySelector(".charts");
  const makers = data.charts.arms && data.charts.arms.length ? [distributionChart, partsChart, loadChart, seedsChart, timeChart] : [loadChart, seedsChart];
  host.replaceChildren();
  const charts = makers.map(make => make(data.arms, data.charts)).filter(Boolean);
  host.dataset.small = charts.filter(chart => !chart.wide).length; // before they are drawn: it decides how wide they are
  charts.forEach(chart => show(host, chart));
  performance.mark("drawn");
  section.dataset.drawn = narrow() ? "narrow" : "wide";
}

function show(host, chart) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), plot = document.createElement("div"), said = document.createElement("output");
  figure.classList.toggle("wide", Boolean(chart.wide));
  caption.textContent = chart.title;
  plot.className = "plot";
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${chart.title}. The left and right arrow keys read values, Escape shows all of it again.`);
  figure.append(caption, keysOf(chart.keys), plot, said);
  if (chart.events && chart.events.length) figure.append(eventList(chart.events));
  host.append(figure);
  Plotly.newPlot(plot, chart.traces, chart.layout, { displayModeBar: false, responsive: true });
  let place = -1;
  plot.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      const all = {};
      for (const key of Object.keys(plot.layout)) if (/^[xy]axis\d*$/.test(key)) { const range = chart.layout[key].range; all[key + ".autorange"] = !range; if (range) all[key + ".range"] = range.slice(); }
      Plotly.relayout(plot, { ...all, shapes: chart.layout.shapes || [] });
      said.textContent = "";
      return;
    }
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !chart.at.length) return;
    event.preventDefault();
    place = Math.max(0, Math.min(chart.at.length - 1, place + by));
    said.textContent = chart.say(chart.at[place]);
    if (chart.cursor) Plotly.relayout(plot, { shapes: chart.cursor(chart.at[place]) });
  });
}

function keysOf(keys) {
  const box = document.createElement("p");
  box.className = "keys";
  for (const { name, ink, dash, bar } of keys) {
    const key = document.createElement("span"), mark = document.createElement("i");
    mark.style.borderColor = `var(--${ink})`;
    mark.className = bar ? "bar" : dash && dash !== "solid" ? "dashed" : "";
    key.append(mark, name);
    box.append(key);
  }
  return box;
}

function eventList(events) {
  const box = document.createElement("details"), summary = document.createElement("summary"), list = document.createElement("ul");
  summary.textContent = `What the scheduler and the nodes did besides: ${events.length} events`;
  for (const one of events) {
    const item = document.createElement("li");
    item.textContent = `${tidy(one.t_s)} s, ${one.arm}: ${one.text}`;
    list.append(item);
  }
  box.append(summary, list);
  return box;
}

const sections = [...document.querySelectorAll("details.scenario")];
for (const section of sections) {
  section.addEventListener("toggle", () => { if (section.open && !section.dataset.drawn) draw(section); });
}
// The words are there before the charts are.
addEventListener("load", () => setTimeout(() => sections.filter(section => section.open && !section.dataset.drawn).forEach(draw)));
const again = () => sections.forEach(section => { if (section.open && section.dataset.drawn) draw(section); else delete section.dataset.drawn; });
for (const changes of [NARROW, DARK]) changes.addEventListener("change", again);
