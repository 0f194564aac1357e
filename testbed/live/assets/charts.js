// The figures over time: six panels on one axis, each a uPlot of a few series, with its latest values as text.

import * as format from "./format.js";

const KEEP_S = 600;
const HEIGHT = 160;

// series: [label, colour (a custom property), style (line | step | dashed | area)]
const PANELS = [
  { id: "link", title: "Link, PrfaaS → PD, Gbps on the wire", from: "link", unit: "Gbps", per: 1e9, words: format.rate,
    series: [["set", "--set", "step"], ["measured", "--prfaas", "area"], ["scheduler's estimate", "--decode", "dashed"]] },
  { id: "threshold", title: "Threshold t, uncached tokens", from: "load", unit: "tokens", per: 1, words: format.count,
    series: [["t", "--pd", "step"]] },
  { id: "ttft", title: "Time to first token at the gateway, model s", from: "load", unit: "s", per: 1, words: format.seconds,
    series: [["p50", "--prfaas", "line"], ["p90", "--decode", "line"], ["p90 promised", "--set", "dashed"]] },
  { id: "offloaded", title: "Prefilled at PrfaaS, share of requests", from: "load", unit: "%", per: 0.01, top: 100, words: format.share,
    series: [["offloaded", "--prfaas", "area"]] },
  { id: "cached", title: "Cache hits, share of prompt tokens", from: "load", unit: "%", per: 0.01, top: 100, words: format.share,
    series: [["reused", "--pd", "area"]] },
  { id: "waiting", title: "Requests before their first token", from: "load", unit: "", per: 1, words: format.count,
    series: [["prefill at PrfaaS", "--prfaas", "line"], ["prefill at PD", "--pd", "line"], ["KV crossing", "--decode", "line"]] },
];

const MARKS = { fault: "--bad", node: "--warn", load: "--set" }; // events that are lines on every panel

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Table {
  constructor(width) {
    this.columns = Array.from({ length: width + 1 }, () => []);
  }

  add(t, values) {
    const times = this.columns[0];
    if (times.length && t <= times[times.length - 1]) return;
    times.push(t);
    values.forEach((value, i) => this.columns[i + 1].push(value));
    const old = times.findIndex((one) => one >= t - KEEP_S);
    if (old > 60) this.columns.forEach((column) => column.splice(0, old));
  }
}

export class Charts {
  constructor(root) {
    this.window_s = 180;
    this.paused = false;
    this.tables = new Map(PANELS.map((panel) => [panel.id, new Table(panel.series.length)]));
    this.panels = PANELS.map((panel) => this.frame(root, panel));
    this.slo_s = null;
    this.marks = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    this.build();
    new ResizeObserver(() => this.resize()).observe(root);
  }

  frame(root, panel) {
    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.id = `chart-${panel.id}`;
    const caption = document.createElement("figcaption");
    const title = document.createElement("span");
    title.className = "title";
    title.textContent = panel.title;
    const keys = document.createElement("span");
    keys.className = "keys";
    const values = panel.series.map(([label, colour, style]) => {
      const key = document.createElement("span");
      const line = document.createElement("i");
      line.style.setProperty("--colour", `var(${colour})`);
      if (style === "dashed") line.className = "dashed";
      const value = document.createElement("b");
      value.textContent = format.NONE;
      key.append(line, `${label} `, value);
      keys.append(key);
      return value;
    });
    caption.append(title, keys);
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.setAttribute("aria-hidden", "true");
    const empty = document.createElement("p");
    empty.className = "empty muted";
    figure.append(caption, plot, empty);
    root.append(figure);
    return { ...panel, plot, values, empty };
  }

  build() {
    for (const panel of this.panels) {
      panel.chart?.destroy();
      const ink = css("--muted"), grid = { stroke: css("--line"), width: 1 };
      const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
      const series = panel.series.map(([label, colour, style]) => ({
        label,
        stroke: css(colour),
        width: style === "dashed" ? 1.25 : 2,
        dash: style === "dashed" ? [5, 4] : undefined,
        fill: style === "area" ? `${css(colour)}22` : undefined,
        paths: style === "step" ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: false },
        spanGaps: false,
      }));
      panel.chart = new uPlot(
        {
          width: Math.max(200, panel.plot.clientWidth),
          height: HEIGHT,
          legend: { show: false },
          cursor: { sync: { key: "live" }, y: false, drag: { x: false, y: false } },
          padding: [8, 6, 0, 0],
          scales: {
            x: { time: true, range: () => this.range() },
            y: { range: (_, low, high) => [0, panel.top ?? Math.max(1e-9, (high ?? 1) * 1.12 || 1)] },
          },
          axes: [
            { ...axis, space: 70, size: 28, values: (_, ticks) => ticks.map((t) => format.clock(t)) },
            { ...axis, size: 54, space: 30, values: (_, ticks) => ticks.map((value) => `${value.toLocaleString("en-US")}${panel.unit === "%" ? " %" : ""}`) },
          ],
          series: [{}, ...series],
          hooks: { setCursor: [() => this.tell()], drawAxes: [(chart) => this.lines(chart)] },
        },
        this.data(panel),
        panel.plot,
      );
    }
    this.tell();
  }

  range() {
    const now = this.now ?? Date.now() / 1e3;
    return [now - this.window_s, now];
  }

  data(panel) {
    const [times, ...columns] = this.tables.get(panel.id).columns;
    return [times, ...columns.map((column) => column.map((value) => (value === null ? null : value / panel.per)))];
  }

  resize() {
    for (const panel of this.panels) panel.chart.setSize({ width: Math.max(200, panel.plot.clientWidth), height: HEIGHT });
  }

  show(window_s) {
    this.window_s = window_s;
    this.draw();
  }

  hello(data) {
    this.slo_s = data.slo.ttft_p90_s;
    const cached = this.panels.find((panel) => panel.id === "cached");
    cached.empty.textContent = data.cache ? "" : "This scenario has no prefix cache (cache_bytes).";
    this.link(data.samples, null);
    for (const point of data.history) this.load(point.t_s, point, point.threshold_tokens, null, data.cache);
    this.hasCache = data.cache;
  }

  take(data) {
    this.now = data.t_s;
    this.link(data.samples, data.scheduler.link_estimate_bps);
    this.load(data.t_s, data.recent, data.scheduler.threshold_tokens, data.stages, this.hasCache);
    if (!this.paused) this.draw();
  }

  mark(events) {
    for (const event of events) if (MARKS[event.kind]) this.marks.set(event.id, event);
    const old = (this.now ?? 0) - KEEP_S;
    for (const [id, event] of this.marks) if (event.t_s < old) this.marks.delete(id);
  }

  lines(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.setLineDash([2, 3]);
    for (const { t_s, kind } of this.marks.values()) {
      const x = Math.round(chart.valToPos(t_s, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = css(MARKS[kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  link(samples, estimate) {
    for (const [t, set, measured] of samples.to_pd) this.tables.get("link").add(t, [set, measured, estimate]);
  }

  load(t, recent, threshold, stages, hasCache) {
    this.tables.get("threshold").add(t, [threshold]);
    this.tables.get("ttft").add(t, [recent.ttft_p50_s, recent.ttft_p90_s, this.slo_s]);
    this.tables.get("offloaded").add(t, [recent.offloaded]);
    this.tables.get("cached").add(t, [hasCache ? recent.cached : null]);
    this.tables.get("waiting").add(t, stages ? [stages.prefill_prfaas, stages.prefill_pd, stages.crossing] : [null, null, null]);
  }

  draw() {
    for (const panel of this.panels) panel.chart.setData(this.data(panel));
    this.tell();
  }

  // The figures beside the keys: where the pointer is, else the latest.
  tell() {
    for (const panel of this.panels) {
      const [times, ...columns] = this.tables.get(panel.id).columns;
      const at = panel.chart?.cursor.idx ?? times.length - 1;
      panel.values.forEach((value, i) => {
        value.textContent = panel.words(columns[i][at] ?? null);
      });
    }
  }
}
