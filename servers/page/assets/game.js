// What is played: a session, its episodes and their steps. It knows no element of the page.

const MAX_EPISODES = 50, MAX_OBSERVATION_CHARS = 32e6;
const OTHERS_TURN_MS = 500; // a reply that takes longer, in a game of several players, waits for the others

class Game {
  /** `onChange` is called whenever there is something else to show. */
  constructor(description, onChange) {
    this.description = description;
    this.onChange = onChange;
    this.session = null;
    this.mode = "new"; // then: opening, waiting, playing, broken, ended
    this.reason = this.queue = null;
    this.busy = false;
    this.hasSeats = ["seat", "table"].every((name) => name in (description.reset.properties ?? {}));
    this.isOthersTurn = this.wasOthersTurn = false; // now; and up to the last reply
    this.episodes = [];
    this.tools = [];
  }

  get episode() {
    return this.episodes.at(-1) ?? null;
  }

  get isOver() {
    return !this.episode || this.episode.done || this.mode === "ended" || this.mode === "new";
  }

  #setMode(mode, fields = {}) {
    Object.assign(this, { mode, reason: null, queue: null }, fields);
    this.onChange();
  }

  async #open(token) {
    this.#setMode("opening");
    const session = (this.session = new ServerSession(token, {
      onQueue: (queue) => this.#setMode("waiting", { queue }),
      onBreak: () => this.mode !== "broken" && this.#setMode("broken"),
      onResume: () => this.#setMode("playing"),
      onEnd: (reason) => {
        if (this.session !== session) return;
        this.session = null;
        this.#setMode(reason === null ? "new" : "ended", { reason });
      },
    }));
    await session.open();
    this.#setMode("playing");
  }

  /** Begin an episode, in a session that is opened for the first one. */
  async reset(options, token) {
    await this.#runExclusive(async () => {
      if (!this.session) await this.#open(token);
      const result = await this.session.ask("reset", options);
      this.episodes.push({ number: (this.episode?.number ?? 0) + 1, options, done: result.done, total: 0, steps: [this.#makeStep(null, result)] });
      if (this.episodes.length > MAX_EPISODES) this.episodes.shift();
      if (!result.done && formsOf(this.description.action).some((form) => form.callsTools)) await this.#findTools();
    });
  }

  async step(action) {
    await this.#runExclusive(async () => {
      const result = await this.session.ask("step", action), episode = this.episode, step = this.#makeStep(action, result);
      episode.steps.push(step);
      episode.total += step.reward ?? (typeof step.metadata?.unscored === "string" ? NaN : 0);
      episode.done = result.done;
      this.#dropOldObservations();
    });
  }

  state() {
    return this.session.ask("state");
  }

  leave(reason = null) {
    this.session?.close(reason);
  }

  async #runExclusive(work) {
    if (this.busy) return;
    this.busy = true;
    this.wasOthersTurn = false;
    this.onChange();
    const timer = setTimeout(() => ((this.isOthersTurn = this.hasSeats), this.onChange()), OTHERS_TURN_MS);
    try {
      await work();
      this.wasOthersTurn = this.isOthersTurn;
    } finally {
      clearTimeout(timer);
      this.busy = this.isOthersTurn = false;
      this.onChange();
    }
  }

  #makeStep(action, { observation, reward, done, metadata }) {
    const size = JSON.stringify(observation).length;
    return { action, observation, reward, done, metadata: metadata ?? observation.metadata, size };
  }

  /** List the tools of the episode; the same list as before keeps the forms that are drawn. */
  async #findTools() {
    const answer = await this.session.ask("mcp", { jsonrpc: "2.0", id: 1, method: "tools/list" }), tools = answer?.result?.tools ?? [];
    if (JSON.stringify(tools) !== JSON.stringify(this.tools)) this.tools = tools;
  }

  /** Forget the oldest observations of a long play: a tab's memory has an end. */
  #dropOldObservations() {
    const steps = this.episodes.flatMap((episode) => episode.steps);
    let total = steps.reduce((sum, step) => sum + step.size, 0);
    for (const step of steps) {
      if (total <= MAX_OBSERVATION_CHARS) break;
      total -= step.size;
      Object.assign(step, { observation: null, size: 0 });
    }
  }
}
