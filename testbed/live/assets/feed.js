// The connection to the gateway: what it tells, and whether it is there. It comes back by itself, and asks for what was
// missed meanwhile.

const AGAIN_MS = 1000;
const SILENT_MS = 6000;

export class Feed {
  // heard: {hello(data), now(data), state(name, since)}; name: connecting | live | lost | ended
  constructor(heard) {
    this.heard = heard;
    this.lastSeen = null;
    this.lostAt = null;
    this.connect();
  }

  connect() {
    const since = this.lastSeen === null ? "" : `?since=${this.lastSeen}`;
    const source = new EventSource(`/prfaas/live${since}`);
    this.source = source;
    const take = (name) => (event) => {
      this.watch();
      const data = JSON.parse(event.data);
      if (name === "now") this.lastSeen = data.t_s;
      if (name === "hello") {
        this.lostAt = null;
        this.heard.state("live");
      }
      this.heard[name](data);
    };
    source.addEventListener("hello", take("hello"));
    source.addEventListener("now", take("now"));
    source.addEventListener("bye", () => this.lost("ended"));
    source.onerror = () => this.lost("lost");
    this.watch();
  }

  watch() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.lost("lost"), SILENT_MS);
  }

  lost(how) {
    this.source.close();
    if (this.lostAt === null) {
      this.lostAt = Date.now() / 1e3;
      this.how = how;
    }
    this.heard.state(this.how, this.lostAt);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), AGAIN_MS);
  }
}
