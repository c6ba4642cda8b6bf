// What is played: a session, its episodes and their steps. It knows no element of the page.

const MOST_EPISODES = 50, MOST_KEPT = 32e6;

class Game {
  /** `changed` is called whenever there is something else to show. */
  constructor(told, changed) {
    this.told = told;
    this.changed = changed;
    this.link = null;
    this.mode = "new"; // then: opening, waiting, playing, broken, ended
    this.why = this.place = null;
    this.busy = false;
    this.episodes = [];
    this.tools = [];
  }

  get episode() {
    return this.episodes.at(-1) ?? null;
  }

  get over() {
    return !this.episode || this.episode.done || this.mode === "ended" || this.mode === "new";
  }

  #set(mode, change = {}) {
    Object.assign(this, { mode, why: null, place: null }, change);
    this.changed();
  }

  async #open(token) {
    this.#set("opening");
    const link = (this.link = new Link(token, {
      queue: (place) => this.#set("waiting", { place }),
      lost: () => this.mode !== "broken" && this.#set("broken"),
      back: () => this.#set("playing"),
      ended: (why) => {
        if (this.link !== link) return;
        this.link = null;
        this.#set(why === null ? "new" : "ended", { why });
      },
    }));
    await link.open();
    this.#set("playing");
  }

  /** Begin an episode, in a session that is opened for the first one. */
  async reset(options, token) {
    await this.#alone(async () => {
      if (!this.link) await this.#open(token);
      const result = await this.link.ask("reset", options);
      this.episodes.push({ number: (this.episode?.number ?? 0) + 1, options, done: result.done, total: 0, steps: [this.#step(null, result)] });
      if (this.episodes.length > MOST_EPISODES) this.episodes.shift();
      if (!this.tools.length && formsOf(this.told.action).some((form) => form.callsTools)) await this.#findTools();
    });
  }

  async step(action) {
    await this.#alone(async () => {
      const result = await this.link.ask("step", action), episode = this.episode;
      episode.steps.push(this.#step(action, result));
      episode.total += result.reward ?? 0;
      episode.done = result.done;
      this.#bound();
    });
  }

  state() {
    return this.link.ask("state");
  }

  leave(why = null) {
    this.link?.close(why);
  }

  async #alone(work) {
    if (this.busy) return;
    this.busy = true;
    this.changed();
    try {
      await work();
    } finally {
      this.busy = false;
      this.changed();
    }
  }

  #step(action, { observation, reward, done, metadata }) {
    const size = JSON.stringify(observation).length;
    return { action, observation, reward, done, metadata: metadata ?? observation.metadata, size };
  }

  async #findTools() {
    const answer = await this.link.ask("mcp", { jsonrpc: "2.0", id: 1, method: "tools/list" });
    this.tools = answer?.result?.tools ?? [];
  }

  /** Forget the oldest observations of a long play: a tab's memory has an end. */
  #bound() {
    const steps = this.episodes.flatMap((episode) => episode.steps);
    let kept = steps.reduce((sum, step) => sum + step.size, 0);
    for (const step of steps) {
      if (kept <= MOST_KEPT) break;
      kept -= step.size;
      Object.assign(step, { observation: null, size: 0 });
    }
  }
}
