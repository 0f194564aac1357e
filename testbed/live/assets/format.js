// Figures as people read them. Rates come in bits/s, times in seconds, sizes in bytes; nothing is there: "–".

export const NONE = "–";

const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export function rate(bps) {
  if (bps === null || bps === undefined) return NONE;
  return bps >= 0.9995e9 ? `${short(bps / 1e9)} Gbps` : bps >= 1e6 || bps === 0 ? `${short(bps / 1e6)} Mbps` : `${short(bps / 1e3)} kbps`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 600 ? `${short(value)} s` : `${(value / 60).toFixed(0)} min`;
}

// A time that stands still: no digits beyond what it has.
export function span(value) {
  return value < 1 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number(value.toPrecision(4)).toLocaleString("en-US")} s`;
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function share(value) {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const steps = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  for (const [step, unit] of steps) if (value >= step) return `${short(value / step)} ${unit}`;
  return `${value.toFixed(0)} B`;
}

export function clock(unix) {
  return new Date(unix * 1e3).toLocaleTimeString("en-GB");
}

// What somebody typed: a number, or null for nothing. Throws for anything else.
export function typed(input, what) {
  const text = input.value.trim().replace(",", ".");
  if (text === "") return null;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new TypeError(`${what} = ${input.value}: a number is needed`);
  return value;
}
