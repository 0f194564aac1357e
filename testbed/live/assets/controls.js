// What people can do: step the link, inject a fault, heal. The gateway checks it all; what it refuses is shown where it
// was asked. Forms speak Gbps, ms and %, requests bits/s, seconds and fractions.

import * as format from "./format.js";

const USUAL_WALL_S = 20;

// amount: [field, label, usual, what one of its unit is]; node: which workers; how: choices
const FAULTS = {
  outage: { label: "Link: outage", how: ["stall", "blackhole", "down"] },
  delay_spike: { label: "Link: delay", amount: ["delay_s", "Delay, one way, ms", 200, 1e-3] },
  loss_burst: { label: "Link: packet loss", amount: ["loss", "Loss, %", 2, 1e-2] },
  slow_worker: { label: "Worker: slower", node: () => true, amount: ["factor", "Times slower", 4, 1] },
  landing_full: { label: "Worker: landing room taken", node: (one) => one.role === "decode", amount: ["fraction", "Taken, %", 100, 1e-2] },
  frozen_worker: { label: "Worker: held (stopped, then goes on)", node: () => true },
  killed_worker: { label: "Worker: killed (then started again)", node: () => true },
  lost_site: { label: "PrfaaS site: lost", how: ["killed", "frozen"] },
};

async function ask(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "Content-Type": "application/json", "X-Prfaas": "1" },
    body: body === undefined ? undefined : JSON.stringify(body),
  }).catch(() => null);
  if (answer === null) throw new Error("the gateway does not answer");
  const told = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(told.error.message), { field: told.error.param });
  return told;
}

export class Controls {
  constructor() {
    this.linkForm = document.getElementById("link-form");
    this.faultForm = document.getElementById("fault-form");
    this.list = document.getElementById("troubles");
    this.healAll = document.getElementById("heal-all");
    this.rows = new Map();
    this.nodes = [];
    this.linkForm.addEventListener("submit", (event) => this.submit(event, () => this.stepLink()));
    this.faultForm.addEventListener("submit", (event) => this.submit(event, () => this.inject()));
    this.linkForm.querySelector(".presets").addEventListener("click", (event) => {
      const share = event.target.dataset.share;
      if (share && this.nominal) this.linkForm.elements.rate.value = Number(((this.nominal * share) / 1e9).toPrecision(4));
    });
    this.faultForm.elements.kind.addEventListener("change", () => this.chosen());
    for (const form of [this.linkForm, this.faultForm]) form.elements.duration.addEventListener("input", () => this.wall(form));
    this.healAll.addEventListener("click", () => this.heal("/prfaas/faults"));
  }

  hello(data) {
    this.scale = data.scale;
    this.nominal = data.link_nominal_bps;
    const usual = Number((USUAL_WALL_S * this.scale.time_scale).toPrecision(2));
    for (const form of [this.linkForm, this.faultForm]) {
      if (!form.elements.duration.value) form.elements.duration.value = usual;
      this.wall(form);
    }
    const select = this.faultForm.elements.kind;
    const before = select.value;
    const options = Object.entries(FAULTS).map(([kind, fault]) => {
      const option = new Option(fault.label, kind);
      option.disabled = !data.controls.kinds.includes(kind) || (fault.label.startsWith("Link") && !data.controls.link);
      if (option.disabled) option.text += " (out of reach here)";
      return option;
    });
    select.replaceChildren(...options);
    if (before) select.value = before;
    this.linkForm.querySelector("fieldset").disabled = !data.controls.link;
    this.chosen();
  }

  now(data) {
    const names = data.nodes.map((node) => `${node.name}:${node.role}`).join();
    if (names !== this.names) {
      this.names = names;
      this.nodes = data.nodes;
      this.chosen();
    }
    this.held(data.troubles);
  }

  // What a kind of fault needs to be told.
  chosen() {
    const { kind, node, how, amount } = this.faultForm.elements;
    const fault = FAULTS[kind.value];
    if (!fault) return;
    const shown = (name, is) => {
      this.faultForm.querySelector(`[data-for=${name}]`).hidden = !is;
    };
    shown("node", fault.node);
    shown("how", fault.how);
    shown("amount", fault.amount);
    if (fault.node) fill(node, this.nodes.filter(fault.node).map((one) => one.name));
    if (fault.how) fill(how, fault.how);
    if (fault.amount && this.kind !== kind.value) {
      this.faultForm.querySelector("[data-amount]").textContent = fault.amount[1];
      amount.value = fault.amount[2];
    }
    this.kind = kind.value;
  }

  wall(form) {
    const model_s = Number(form.elements.duration.value);
    const known = this.scale && form.elements.duration.value && Number.isFinite(model_s);
    form.querySelector("[data-wall]").textContent = known ? `= ${format.span(model_s / this.scale.time_scale)} of wall time` : "";
  }

  stepLink() {
    const { rate, delay, duration } = this.linkForm.elements;
    const body = { duration_s: format.typed(duration, "For") };
    const [gbps, ms] = [format.typed(rate, "Rate"), format.typed(delay, "Delay")];
    if (gbps !== null) body.rate_bps = gbps * 1e9;
    if (ms !== null) body.delay_s = ms / 1e3;
    return ask("POST", "/prfaas/link", body);
  }

  inject() {
    const { kind, node, how, amount, duration } = this.faultForm.elements;
    const fault = FAULTS[kind.value];
    const body = { kind: kind.value, duration_s: format.typed(duration, "For") };
    if (fault.node) body.node = node.value;
    if (fault.how) body.how = how.value;
    if (fault.amount) body[fault.amount[0]] = Number((format.typed(amount, fault.amount[1]) * fault.amount[3]).toPrecision(12));
    return ask("POST", "/prfaas/faults", body);
  }

  async submit(event, send) {
    event.preventDefault();
    const form = event.target, output = form.querySelector("output"), button = form.querySelector("[type=submit]");
    for (const input of form.querySelectorAll("input")) input.removeAttribute("aria-invalid");
    button.setAttribute("aria-disabled", "true");
    output.textContent = "…";
    try {
      const made = await send();
      output.dataset.state = "done";
      output.textContent = `${made.what}: done; it heals in ${format.span(Math.round(made.heals_in_s))} (model)`;
    } catch (error) {
      output.dataset.state = "refused";
      output.textContent = error.message;
      const inputs = { rate_bps: "rate", delay_s: form === this.linkForm ? "delay" : "amount", duration_s: "duration", loss: "amount", factor: "amount", fraction: "amount" };
      form.elements[inputs[error.field]]?.setAttribute("aria-invalid", "true");
    }
    button.removeAttribute("aria-disabled");
  }

  async heal(path) {
    try {
      await ask("DELETE", path);
    } catch (error) {
      const output = this.faultForm.querySelector("output");
      output.dataset.state = "refused";
      output.textContent = error.message;
    }
  }

  held(troubles) {
    const there = new Set(troubles.map((one) => one.id));
    for (const [id, row] of this.rows) {
      if (there.has(id)) continue;
      const focused = row.item.contains(document.activeElement);
      row.item.remove();
      this.rows.delete(id);
      if (focused) document.getElementById("controls-title").focus(); // not lost with the button
    }
    for (const one of troubles) {
      const row = this.rows.get(one.id) ?? this.row(one);
      row.item.dataset.state = one.state;
      row.left.textContent =
        one.state === "holds" ? `heals in ${format.seconds(one.heals_in_s)} (model)` : one.state === "stuck" ? `cannot be healed yet: ${one.why}` : one.state === "heals" ? "healing" : "beginning";
    }
    this.healAll.hidden = troubles.length < 2;
    document.getElementById("no-troubles").hidden = troubles.length > 0;
  }

  row(one) {
    const item = document.createElement("li"), words = document.createElement("span"), left = document.createElement("span");
    left.className = "left";
    words.append(one.what, left);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Heal now";
    button.setAttribute("aria-label", `Heal now: ${one.what}`);
    button.addEventListener("click", () => this.heal(`/prfaas/faults/${one.id}`));
    item.append(words, button);
    this.list.append(item);
    this.rows.set(one.id, { item, left });
    return this.rows.get(one.id);
  }
}

// A select's choices, keeping what was chosen.
function fill(select, choices) {
  if ([...select.options].map((option) => option.value).join() === choices.join()) return;
  const before = select.value;
  select.replaceChildren(...choices.map((choice) => new Option(choice, choice)));
  if (choices.includes(before)) select.value = before;
}
