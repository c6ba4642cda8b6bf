// The filters as controls: they show what is filtered, and tell of changes.

class Controls {
  constructor(filters, changed) {
    this.filters = filters;
    this.changed = changed;
    const set = (change) => this.#set(change);
    let typing = 0;
    byId("q").oninput = (event) => {
      clearTimeout(typing);
      typing = setTimeout(() => set({ q: event.target.value.trim() }), 120);
    };
    for (const [id, key] of [["reward-min", "rewardMin"], ["reward-max", "rewardMax"], ["step-min", "stepMin"], ["step-max", "stepMax"]]) {
      byId(id).onchange = (event) => set({ [key]: numberOrNull(event.target.value) });
    }
    byId("masked").onchange = (event) => set({ masked: event.target.checked });
    byId("sort").append(...Object.entries(ORDERS).map(([value, [words]]) => make("option", { value, textContent: words })));
    byId("sort").onchange = (event) => set({ sort: event.target.value });
    byId("clear").onclick = () => set({ ...NO_FILTERS, sort: this.filters.sort });
    this.curve = new Curve(byId("steps"), byId("steps-words"), (stepMin, stepMax) => set({ stepMin, stepMax }));
    byId("filters").onsubmit = (event) => event.preventDefault();
  }

  #set(change) {
    this.filters = { ...this.filters, ...change };
    this.changed(this.filters);
  }

  /** Show the filters, and how many records each choice would leave. */
  show(records, filters) {
    this.filters = filters;
    if (document.activeElement !== byId("q")) byId("q").value = filters.q;
    byId("reward-min").value = filters.rewardMin ?? "";
    byId("reward-max").value = filters.rewardMax ?? "";
    byId("step-min").value = filters.stepMin ?? "";
    byId("step-max").value = filters.stepMax ?? "";
    byId("masked").checked = filters.masked;
    byId("sort").value = filters.sort;
    const { sort, ...others } = filters;
    byId("clear").hidden = Object.keys(others).every((key) => `${others[key]}` === `${NO_FILTERS[key]}`);
    byId("endings").replaceChildren(...endingCounts(records, filters).map((one) => this.#ending(...one)));
    this.curve.show(records, filters);
    const bars = rewardBars(records, filters);
    const most = Math.max(1, ...bars.map((bar) => bar.all));
    byId("histogram").replaceChildren(...bars.map((bar) => this.#bar(bar, most)));
  }

  #ending(ending, count) {
    const on = this.filters.endings.includes(ending);
    const button = make("button", { type: "button", className: `ending ${endingKind(ending)}` }, `${endingWords(ending)} `,
      make("b", { textContent: whole(count) }));
    button.ariaPressed = `${on}`;
    button.onclick = () =>
      this.#set({ endings: on ? this.filters.endings.filter((one) => one !== ending) : [...this.filters.endings, ending] });
    return button;
  }

  #bar(bar, most) {
    const on = this.filters.rewardMin === bar.from && this.filters.rewardMax === bar.to;
    const words = bar.from === bar.to ? signed(bar.from) : `${signed(bar.from)} to ${signed(bar.to)}`;
    const button = make("button", { type: "button" }, make("i"), make("i"));
    button.title = button.ariaLabel = `reward ${words}: ${whole(bar.chosen)} of ${whole(bar.all)}`;
    button.children[0].style.height = `${(100 * bar.all) / most}%`;
    button.children[1].style.height = `${(100 * bar.chosen) / most}%`;
    button.ariaPressed = `${on}`;
    button.onclick = () => this.#set(on ? { rewardMin: null, rewardMax: null } : { rewardMin: bar.from, rewardMax: bar.to });
    return button;
  }
}
