// The sites, their nodes and the link between them, as they are now. Elements are made once and then only filled in, so
// that nothing jumps.

import * as format from "./format.js";

const LONG_QUEUE_S = 10; // model seconds: a full bar

export class Topology {
  constructor() {
    this.lists = { prfaas: document.getElementById("nodes-prfaas"), pd: document.getElementById("nodes-pd") };
    this.wires = document.getElementById("wires");
    this.pipe = document.getElementById("pipe");
    this.nodes = new Map();
    new ResizeObserver(() => this.draw()).observe(document.getElementById("topology"));
  }

  take(data, nominal) {
    const names = data.nodes.map((node) => node.name).join();
    if (names !== this.names) this.make(data.nodes, names);
    for (const node of data.nodes) this.fill(node);
    this.link(data, nominal);
    this.draw();
  }

  make(nodes, names) {
    this.names = names;
    this.nodes.clear();
    for (const list of Object.values(this.lists)) list.replaceChildren();
    for (const node of nodes) {
      const item = document.createElement("li");
      item.className = "node";
      item.dataset.site = node.site;
      const parts = {};
      for (const part of ["name", "role", "bar", "figure", "state"]) {
        parts[part] = document.createElement(part === "bar" ? "div" : "span");
        parts[part].className = part;
        item.append(parts[part]);
      }
      parts.fill = document.createElement("span");
      parts.bar.append(parts.fill);
      parts.name.textContent = node.name;
      this.lists[node.site].append(item);
      this.nodes.set(node.name, { item, parts, site: node.site });
    }
  }

  fill(node) {
    const { item, parts } = this.nodes.get(node.name);
    this.nodes.get(node.name).bps = node.cross_bps;
    item.dataset.role = node.role;
    item.dataset.state = node.state;
    item.toggleAttribute("data-hindered", node.slowdown !== 1);
    parts.role.textContent = node.becomes ? `${node.role} → ${node.becomes}` : node.role;
    const decode = node.role === "decode";
    const full = decode ? node.decoding_requests / Math.max(1, node.slots) : node.queued_s / LONG_QUEUE_S;
    parts.fill.style.setProperty("--fill", `${Math.min(100, full * 100).toFixed(1)}%`);
    parts.figure.textContent = decode
      ? `${node.decoding_requests} of ${node.slots} slots, ${node.assigned_requests - node.decoding_requests} to come`
      : `${node.queued_requests} queued, ${format.seconds(node.queued_s)} of work`;
    parts.state.textContent =
      node.state !== "up" ? node.state : node.slowdown !== 1 ? `${node.slowdown}× slower` : node.cross_bps ? format.rate(node.cross_bps) : "";
  }

  link(data, nominal) {
    const state = data.link.to_pd;
    const measured = mean(data.samples.to_pd), back = mean(data.samples.to_prfaas);
    if (measured !== null) this.measured = measured;
    if (back !== null) this.back = back;
    const text = (id, words) => {
      document.getElementById(id).textContent = words;
    };
    text("pipe-measured", format.rate(this.measured ?? null));
    if (!state) {
      text("pipe-set", "");
      text("pipe-state", "the link's agent tells nothing");
      this.pipe.dataset.state = "changed";
      return;
    }
    text("pipe-set", `of ${format.rate(state.rate_bps)}`);
    const used = state.outage ? 0 : (this.measured ?? 0) / state.rate_bps;
    document.getElementById("pipe-bar").style.setProperty("--fill", `${Math.min(100, used * 100).toFixed(1)}%`);
    const said = [];
    if (state.outage) said.push(`outage: ${state.outage}`);
    if (state.rate_bps !== nominal && !state.outage) said.push(`nominal ${format.rate(nominal)}`);
    if (state.delay_s) said.push(`${format.seconds(state.delay_s)} delay`);
    if (state.loss) said.push(`${format.share(state.loss)} loss`);
    text("pipe-state", said.join(", ") || "as its scenario says");
    this.pipe.dataset.state = state.outage ? "outage" : state.rate_bps !== nominal ? "changed" : "";
    text("pipe-crossing", `${data.stages.crossing} crossing, ${format.bytes(data.scheduler.unsent_bytes)} unsent`);
    text("pipe-back", `back: ${format.rate(this.back ?? null)}`);
  }

  // Lines from each PrfaaS node into the link, and from it to each node of the other site; as thick as what flows.
  draw() {
    const box = this.wires.getBoundingClientRect();
    if (!box.width) return;
    const pipe = this.pipe.getBoundingClientRect();
    const middle = pipe.top + pipe.height / 2 - box.top;
    const most = Math.max(1, ...[...this.nodes.values()].map((node) => node.bps ?? 0));
    const paths = [...this.nodes.values()].map(({ item, site, bps }) => {
      const at = item.getBoundingClientRect();
      const y = at.top + at.height / 2 - box.top;
      const [from, to] = site === "prfaas" ? [0, pipe.left - box.left] : [box.width, pipe.right - box.left];
      const bend = (from + to) / 2;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${from} ${y}C${bend} ${y} ${bend} ${middle} ${to} ${middle}`);
      path.setAttribute("stroke-width", bps ? (1.5 + (5 * bps) / most).toFixed(1) : "1");
      if (!bps) path.setAttribute("class", "idle");
      return path;
    });
    paths.sort((a, b) => b.classList.contains("idle") - a.classList.contains("idle"));
    this.wires.replaceChildren(...paths);
  }
}

function mean(samples) {
  const told = samples.map((sample) => sample[2]).filter((value) => value !== null);
  return told.length ? told.reduce((sum, value) => sum + value, 0) / told.length : null;
}
