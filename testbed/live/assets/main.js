// The live page: what the feed tells goes to the tiles, the topology, the charts, the controls and the log.

import { Charts } from "./charts.js";
import { Controls } from "./controls.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Log, reasons } from "./log.js";
import { Topology } from "./topology.js";

const by = (id) => document.getElementById(id);
const text = (id, words) => {
  by(id).textContent = words || "\u00a0";
};

const charts = new Charts(by("charts"));
const controls = new Controls();
const log = new Log(by("log"));
const topology = new Topology();
let about = null;

function hello(data) {
  about = data;
  document.title = `${data.scenario}, live`;
  text("scenario", `${data.scenario}: ${data.deployment}`);
  charts.hello(data);
  charts.mark(data.events);
  controls.hello(data);
  log.add(data.events);
}

function now(data) {
  if (!paused()) {
    tiles(data);
    topology.take(data, about.link_nominal_bps);
    reasons(by("reasons"), data.recent.reasons, span());
  }
  charts.mark(data.events);
  charts.take(data);
  controls.now(data);
  log.add(data.events);
}

function span() {
  return `${format.span(about.span_s)} of wall time (${format.span(about.span_s * about.scale.time_scale)} model)`;
}

function tiles(data) {
  const { session, scheduler, recent, stages } = data;
  const { time_scale, byte_scale } = about.scale;
  const running = data.model_s >= 0;
  text("clock", [
    `model time ${data.model_s.toFixed(1)} s`,
    `wall time ${(data.model_s / time_scale).toFixed(1)} s`,
    `scale: ${time_scale} model s a second, ${byte_scale} byte on the wire for one of the model`,
  ].join(" · "));
  text("tile-session", session.load ? (running ? "load running" : "load begins") : "no load");
  text("tile-session-sub", session.load ? session.id : "whoever comes is served");
  text("tile-threshold", scheduler.threshold_tokens === null ? format.NONE : `${format.count(scheduler.threshold_tokens)}`);
  text("tile-threshold-sub", `${session.policy}${scheduler.regime ? `, bandwidth ${scheduler.regime}` : ""}`);
  text("tile-ttft", `${format.seconds(recent.ttft_p50_s)}, ${format.seconds(recent.ttft_p90_s)}`);
  text("tile-ttft-sub", `promised p90 ${format.span(about.slo.ttft_p90_s)}`);
  text("tile-offloaded", format.share(recent.offloaded));
  text("tile-offloaded-sub", `of ${recent.requests} in ${format.span(about.span_s)} wall`);
  const link = data.link.to_pd;
  text("tile-link", link ? (link.outage ? `outage: ${link.outage}` : format.rate(link.rate_bps)) : format.NONE);
  text("tile-link-sub", `estimated ${format.rate(scheduler.link_estimate_bps)}`);
  text("tile-flight", format.count(session.in_flight));
  const ended = session.ended;
  text("tile-flight-sub", `${format.count(ended.ok ?? 0)} done, ${format.count(ended.failed ?? 0)} failed`);
  text("honesty", `Timers late, p99 (wall): workers ${format.seconds(data.late_p99_s.workers)}, gateway ${format.seconds(data.late_p99_s.gateway)}. TTFT here is from arrival at the gateway to the first token leaving the decode node; a report's own is the client's. ${stages.decoding} requests decode.`);
}

const STATES = {
  connecting: () => "connecting",
  live: () => "live",
  lost: (since) => `gateway lost at ${format.clock(since)}, trying again`,
  ended: (since) => `testbed ended at ${format.clock(since)}, waiting for it`,
};

function state(name, since) {
  const pill = by("connection");
  const words = STATES[name](since);
  if (pill.textContent !== words) pill.textContent = words;
  pill.dataset.state = name === "ended" ? "lost" : name;
}

const paused = () => by("pause").getAttribute("aria-pressed") === "true";
by("pause").addEventListener("click", () => {
  by("pause").setAttribute("aria-pressed", String(!paused()));
  charts.paused = paused();
  if (!charts.paused) charts.draw();
});
by("window").addEventListener("change", (event) => charts.show(Number(event.target.value)));

new Feed({ hello, now, state });
