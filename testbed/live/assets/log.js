// What happened, newest first; and the rules by which requests went where they went, of late.

import * as format from "./format.js";

const MOST = 200;

export class Log {
  constructor(list) {
    this.list = list;
    this.seen = new Set();
  }

  add(events) {
    const made = [];
    for (const event of events) {
      if (this.seen.has(event.id)) continue;
      this.seen.add(event.id);
      const item = document.createElement("li");
      item.dataset.kind = event.kind;
      const when = part("span", "when", `${format.clock(event.t_s)}, ${event.model_s < 0 ? "before t = 0" : `t ${event.model_s.toFixed(1)} s`}`);
      const what = part("span", "what", event.text);
      if (event.why) what.append(part("span", "why", event.why));
      item.append(when, part("span", "kind", event.kind.replace("_", " ")), what);
      made.unshift(item);
    }
    this.list.prepend(...made);
    while (this.list.children.length > MOST) this.list.lastElementChild.remove();
  }
}

export function reasons(table, told, span) {
  const total = told.reduce((sum, one) => sum + one.requests, 0);
  table.caption.textContent = `${total} requests got their first token in the last ${span}`;
  const rows = told.map((one) => {
    const row = document.createElement("tr");
    row.append(
      part("td", "", one.reason),
      part("td", "", one.site === "prfaas" ? "PrfaaS" : "PD"),
      part("td", "num", `${one.requests} (${format.share(one.requests / total)})`),
    );
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
}

function part(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}
