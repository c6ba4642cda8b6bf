// Puts the page together: what is shown of the game, and what buttons and keys do.

const TOKEN = "ropewalk token";
const LEADING = ["text", "prompt", "task", "message", "error", "stdout", "stderr", "outputs", "result"];

function storedValue(name, value) {
  try {
    if (value !== undefined) sessionStorage.setItem(name, value);
    return sessionStorage.getItem(name);
  } catch {
    return null; // a page in somebody's frame may have no memory
  }
}

/** What an action does, in one line. */
function summaryOf(action) {
  const { type, tool_name: tool, arguments: toolArguments, metadata, ...rest } = action;
  const values = Object.entries(tool ? toolArguments ?? {} : rest);
  const short = (value) => (typeof value === "string" ? value : JSON.stringify(value)).replace(/\s+/g, " ").slice(0, 80);
  const valueText = values.length === 1 && !tool ? short(values[0][1]) : values.map(([name, value]) => `${name}: ${short(value)}`).join(", ");
  return [tool ?? (type && type !== "call_tool" ? type.replaceAll("_", " ") : ""), valueText].filter(Boolean).join("  ");
}

class Main {
  constructor(description) {
    this.description = description;
    this.game = new Game(description, () => this.draw());
    this.raw = false;
    this.view = null; // the episode and the step that are looked at; null: the last ones
    this.drawnTools = null;
    byId("title").textContent = description.title;
    this.reset = new FormView({ ...formsOf(description.reset)[0], title: "reset" }, "New episode", (options) => this.begin(options), "n");
    const seed = this.reset.fields.find((one) => one.field.name === "seed");
    const others = this.reset.fields.filter((one) => one !== seed && one.field.name !== "episode_id");
    this.reset.fields.find((one) => one.field.name === "episode_id")?.element.remove();
    const more = make("details", { open: this.game.hasSeats }, make("summary", { textContent: "options" }), ...others.map((one) => one.element));
    this.reset.element.prepend(this.reset.element.querySelector(".buttons"), seed?.element ?? "", others.length ? more : "");
    byId("reset").append(this.reset.element);
    this.#about();
    byId("leave").onclick = () => this.game.leave();
    byId("state-button").onclick = () => this.showState();
    byId("raw").onclick = () => this.toggleRaw();
    byId("now").onclick = () => this.showView(null);
    for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => this.#restartIdleTimer(), { passive: true });
    addEventListener("pagehide", () => this.game.leave());
    this.draw();
    document.body.dataset.ready = "yes";
  }

  #about() {
    const { name, description, version, author, documentation_url: url, readme_content: readme } = this.description.about;
    const link = /^https?:\/\//.test(url ?? "") ? make("a", { href: url, rel: "noopener noreferrer", target: "_blank", textContent: "documentation" }) : null;
    byId("about").append(make("p", { textContent: description }),
      make("p", { className: "none" }, [name, version, author].filter(Boolean).join(" · "), link && " · ", link),
      readme ? make("details", {}, make("summary", { textContent: "readme" }), make("div", { className: "text", textContent: readme.replace(/^---\n[\s\S]*?\n---\n/, "").trim() })) : "");
  }

  /** A session that nobody plays in is given back; whoever waits in the queue has nothing to do. */
  #restartIdleTimer() {
    clearTimeout(this.idleTimer);
    const { idle_s: seconds } = this.description, duration = seconds < 60 ? counted(seconds, "second") : counted(Math.round(seconds / 60), "minute");
    const leave = () => this.game.leave(`Nothing was done for ${duration}, so the session was given back.`);
    this.idleTimer = setTimeout(() => (this.game.mode === "waiting" ? this.#restartIdleTimer() : leave()), 1000 * seconds);
  }

  async begin(options) {
    this.view = null;
    this.#restartIdleTimer();
    try {
      await this.game.reset(options, storedValue(TOKEN));
    } catch (error) {
      if (error.errors || this.game.session) throw error; // else the notice says it
    }
    this.focusAction();
  }

  async step(action) {
    this.view = null;
    await this.game.step(action);
    if (this.game.isOver) this.reset.element.querySelector(".do").focus();
  }

  focusAction() {
    if (!this.game.isOver) this.forms?.find((form) => form.element.isConnected)?.focus();
  }

  showView(view) {
    this.view = view;
    this.draw();
  }

  move(by) {
    const { episode, at } = this.currentView();
    if (!episode) return;
    const to = Math.max(0, Math.min(episode.steps.length - 1, at + by));
    this.showView(episode === this.game.episode && to === episode.steps.length - 1 ? null : { episode, at: to });
  }

  currentView() {
    const episode = this.view?.episode ?? this.game.episode;
    return { episode, at: this.view?.at ?? (episode ? episode.steps.length - 1 : 0) };
  }

  toggleRaw() {
    this.raw = !this.raw;
    this.draw();
  }

  async showState() {
    if (!this.game.session || this.game.busy) return;
    try {
      byId("state-box").replaceChildren(valueBox(await this.game.state()));
    } catch (error) {
      byId("state-box").replaceChildren(make("p", { className: "wrong", textContent: error.message }));
    }
    byId("state").showModal();
  }

  draw() {
    const { game } = this;
    document.body.dataset.mode = game.mode;
    document.body.classList.toggle("busy", game.busy);
    byId("leave").hidden = !game.session;
    byId("leave").textContent = game.mode === "waiting" ? "leave the queue" : "leave";
    byId("state-button").hidden = game.mode !== "playing";
    const isCalled = game.wasOthersTurn && !game.isOver;
    document.title = `${isCalled ? "● your turn · " : ""}${this.description.title} · play`;
    byId("status").textContent = { new: "", opening: "connecting …", waiting: "in the queue", playing: "playing", broken: "reconnecting …", ended: "ended" }[game.mode];
    this.#notice();
    this.#observation();
    this.#actions();
    this.#history();
  }

  #notice() {
    const { mode, queue, reason, episode } = this.game, box = byId("notice");
    const show = (kind, title, text) => {
      box.className = `notice ${kind}`;
      box.replaceChildren(make("h2", { textContent: title }), make("p", { textContent: text }));
    };
    box.hidden = false;
    if (mode === "waiting") {
      const estimate = queue.estimate_s === null ? "" : ` That takes about ${counted(Math.max(1, Math.round(queue.estimate_s)), "second")}.`;
      show("", `You are number ${queue.place} of ${queue.waiting} in the queue`, `Every session is taken. Yours begins as soon as one is given back.${estimate}`);
    } else if (mode === "broken") show("", "The connection broke", "Trying to get back to your session; nothing is lost yet.");
    else if (mode === "ended") show("wrong", "The session has ended", `${reason} A new episode opens another.`);
    else if (this.game.isOthersTurn && mode === "playing") show("", "It is not your turn", "Waiting for the other players. The page says when it is your turn, in its title too.");
    else if (this.game.wasOthersTurn && !this.game.isOver && !this.view) show("good", "It is your turn", "The other players have acted.");
    else if (!episode) show("", this.description.about.description, "“New episode” opens a session that is yours alone. A seed gives the same episode again, where the environment keeps to it.");
    else if (episode.done && !this.view) show(episode.total < 0 ? "bad" : episode.total > 0 ? "good" : "", `Episode ${episode.number} is over: ${signed(episode.total)}`, `${counted(episode.steps.length - 1, "step")}. Begin another with “New episode”.`);
    else box.hidden = true;
  }

  #observation() {
    const { episode, at } = this.currentView(), box = byId("observation"), step = episode?.steps[at];
    byId("head").hidden = !episode;
    byId("past").hidden = !this.view;
    if (!episode) return box.replaceChildren();
    byId("where").textContent = `episode ${episode.number}, ${at ? `step ${at} of ${episode.steps.length - 1}` : "reset"}`;
    byId("reward").textContent = typeof step.reward === "number" ? `reward ${signed(step.reward)}` : "";
    byId("reward").className = `reward ${shade(step.reward ?? 0)}`;
    byId("raw").ariaPressed = `${this.raw}`;
    if (this.drawn === step && this.drawnRaw === this.raw) return null;
    [this.drawn, this.drawnRaw] = [step, this.raw];
    if (!step.observation) return box.replaceChildren(make("p", { className: "none", textContent: "This observation is no longer kept: the play is long." }));
    if (this.raw) return box.replaceChildren(make("div", { className: "text", textContent: JSON.stringify(step.observation, null, 2) }));
    const names = Object.keys(step.observation).filter((name) => !["metadata", "reward", "done"].includes(name));
    const isText = (name) => typeof step.observation[name] === "string" && step.observation[name] && !pictureOf(step.observation[name]);
    const [leadName] = ["text", "prompt", "task"].filter((name) => isText(name));
    const rest = names.filter((name) => name !== leadName && !(step.observation[name] === null || step.observation[name] === ""));
    rest.sort((a, b) => (LEADING.indexOf(a) + 1 || 99) - (LEADING.indexOf(b) + 1 || 99));
    const metadata = Object.keys(step.metadata ?? {}).length ? make("details", {}, make("summary", { textContent: "metadata" }), valueBox(step.metadata)) : "";
    box.replaceChildren(leadName ? make("div", { className: "lead", textContent: step.observation[leadName] }) : "", rest.length ? fieldsBox(step.observation, 0, rest) : "", metadata);
    return null;
  }

  #actions() {
    const { game } = this, box = byId("actions");
    box.hidden = game.isOver;
    box.inert = game.busy || game.mode !== "playing";
    if (game.isOver || this.drawnTools === game.tools) return;
    this.drawnTools = game.tools;
    const kinds = formsOf(this.description.action).filter((form) => !form.listsTools && !(form.callsTools && game.tools.length));
    const parts = kinds.map((form) => ({ name: form.title.replace(/Action$/, ""), about: form.description, view: new FormView(form, kinds.length > 1 ? form.title : "Step", (values) => this.step(values)) }));
    for (const tool of game.tools) {
      const form = { ...formsOf(tool.inputSchema ?? tool.input_schema ?? {})[0], fixed: {} };
      const call = (values) => this.step({ type: "call_tool", tool_name: tool.name, arguments: values });
      parts.push({ name: tool.name, about: tool.description ?? "", view: new FormView(form, `Call ${tool.name}`, call) });
    }
    this.forms = parts.map((part) => part.view);
    const place = make("div", { id: "form" }), tabs = make("div", { id: "kinds", role: "tablist" });
    const open = (at, focus = true) => {
      [...tabs.children].forEach((tab, n) => ((tab.ariaSelected = `${n === at}`), (tab.tabIndex = n === at ? 0 : -1)));
      const about = parts[at].about.split(/\n\s*\n|\nAttributes:/)[0].trim();
      place.replaceChildren(make("p", { className: "hint", textContent: about }), parts[at].view.element);
      if (focus) tabs.children[at].focus();
    };
    parts.forEach((part, at) => tabs.append(make("button", { type: "button", role: "tab", textContent: part.name, title: part.about, onclick: () => (open(at), parts[at].view.focus()) })));
    tabs.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const at = [...tabs.children].indexOf(document.activeElement);
      if (by) open((at + by + parts.length) % parts.length);
    };
    tabs.hidden = parts.length === 1;
    box.replaceChildren(tabs, place);
    open(0, false);
  }

  #history() {
    const { episode, at } = this.currentView();
    const actionSteps = episode?.steps.slice(1) ?? [];
    const observations = (episode?.steps ?? []).map((step) => step.observation).filter(Boolean);
    const hasRewards = actionSteps.some((step) => typeof step.reward === "number");
    byId("rewards").hidden = !hasRewards;
    if (hasRewards) {
      byId("total").textContent = signed(episode.total);
      byId("total").className = shade(episode.total);
      byId("chart").replaceChildren(rewardChart(actionSteps.map((step) => step.reward ?? 0)), ...numberCurves(observations));
    }
    byId("steps").replaceChildren(...(episode?.steps ?? []).map((step, n) => {
      const text = n ? summaryOf(step.action) : `reset${Object.entries(episode.options).map(([name, value]) => ` ${name} ${JSON.stringify(value)}`).join(",")}`;
      const button = make("button", { type: "button", onclick: () => this.showView({ episode, at: n }) },
        make("span", { className: "none", textContent: n }), make("span", { className: "what", textContent: text }),
        make("span", { className: `reward ${shade(step.reward ?? 0)}`, textContent: n && typeof step.reward === "number" ? signed(step.reward) : "" }));
      button.ariaCurrent = n === at ? "step" : "false";
      return make("li", {}, button);
    }));
    byId("no-steps").hidden = Boolean(episode);
    byId("steps").scrollTop = (byId("steps").querySelector("[aria-current=step]")?.offsetTop ?? 0) - byId("steps").clientHeight / 2;
    byId("episodes").replaceChildren(...(this.game.episodes.length > 1 ? this.game.episodes : []).map((one) => {
      const button = make("button", { type: "button", className: shade(one.total), textContent: `${one.number}: ${signed(one.total)}`, title: `episode ${one.number}` });
      button.ariaPressed = `${one === episode}`;
      button.onclick = () => this.showView(one === this.game.episode ? null : { episode: one, at: one.steps.length - 1 });
      return button;
    }));
  }
}

function keyTable(main) {
  return [
    [["n"], "new episode, with what is filled in", () => main.game.busy || main.reset.send()],
    [[..."123456789"], "a choice of the action", (digit) => main.game.isOver || main.game.busy || main.forms.find((form) => form.element.isConnected).press(digit)],
    [["a"], "go to the action", () => main.focusAction()],
    [["k", "["], "the step before", () => main.move(-1)],
    [["j", "]"], "the step after", () => main.move(1)],
    [["Escape"], "leave a field; back to the present", () => (document.activeElement.blur(), main.showView(null))],
    [["x"], "the observation as JSON", () => main.toggleRaw()],
    [["s"], "the state", () => main.showState()],
    [["t"], "light, dark, or as the system has it", nextTheme],
    [["?"], "this help", () => byId("help").showModal()],
  ];
}

/** Load the page's description, with the visitor's token if the server asks for one. */
async function load() {
  const token = storedValue(TOKEN);
  const answer = await fetch("page.json", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
  if (answer.status === 401) {
    byId("token-wrong").hidden = !token;
    byId("token").showModal();
    return;
  }
  if (!answer.ok) throw new Error(`the server answered status ${answer.status}`);
  listenToKeys(keyTable(new Main(await answer.json())));
}

function start() {
  byId("notice").hidden = true;
  load().catch((error) => {
    byId("notice").hidden = false;
    byId("notice").replaceChildren(make("h2", { textContent: "The page could not be filled" }), make("p", { textContent: error.message }));
  });
}

byId("token").oncancel = (event) => event.preventDefault();
byId("token-form").onsubmit = () => {
  // What comes along when it is pasted, such as a zero-width space: no header can have it.
  storedValue(TOKEN, byId("token-input").value.replace(/[^\x21-\x7e]/g, ""));
  start();
};
start();
