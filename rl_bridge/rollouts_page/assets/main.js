// Puts the parts together: what is chosen, how it is shown, what a key does.

const settings = JSON.parse(byId("settings").textContent);

class Page {
  constructor() {
    this.records = new Records();
    Object.assign(this, readLink(location.hash));
    this.list = new List(byId("list"), byId("rows"), (record) => this.choose(record));
    this.controls = new Controls(this.filters, (filters) => this.filter(filters));
    this.reading = new Reading(byId("head"), byId("turns"), byId("tip"), {
      choose: (record) => this.choose(record),
      change: (key, value) => this.change(key, value),
      at: (turn) => this.goTo(turn),
    });
    addEventListener("hashchange", () => this.follow());
  }

  async load() {
    const progress = (number) => (byId("count").textContent = `reading ${whole(number)} …`);
    this.records = await loadRecords(embeddedLines(byId("records")), progress);
    this.draw();
    document.body.dataset.ready = "yes";
  }

  get record() {
    return this.group === null ? null : this.records.find(this.group, this.sibling);
  }

  /** Everything anew, after a change of records or of the address. */
  draw() {
    this.chosen = chosenRecords(this.records, this.filters);
    this.list.show(this.chosen);
    this.controls.show(this.records, this.filters);
    const told = [`${whole(this.chosen.length)} of ${counted(this.records.all.length, "trajectory", "trajectories")}`];
    if (this.records.unreadable) told.push(`${counted(this.records.unreadable, "line")} could not be read`);
    if (this.records.unscored) told.push(`${whole(this.records.unscored)} more without a reward`);
    if (this.group !== null && !this.record) told.push(`group ${this.group} was not kept`);
    byId("count").textContent = told.join(", ");
    if (!this.record && this.chosen.length) [this.group, this.sibling, this.turn] = [this.chosen[0].group, this.chosen[0].sibling, 0];
    this.read(this.turn);
  }

  read(turn = 0) {
    const record = this.record;
    if (!record) {
      this.reading.empty(this.records.all.length ? "Choose a trajectory." : "No rollouts were kept yet.");
      return;
    }
    this.turn = Math.min(turn, Math.max(0, record.turns.length - 1));
    this.list.select(record);
    this.reading.show(record, this.records, this.view, this.filters.q);
    this.reading.seek(this.turn);
    document.title = `${record.group}.${record.sibling} · ${settings.title} · rollouts`;
    this.link();
  }

  link() {
    const address = writeLink(this);
    if (address !== (location.hash || "#")) history.replaceState(null, "", address);
  }

  follow() {
    Object.assign(this, readLink(location.hash));
    this.draw();
  }

  choose(record) {
    if (!record || record === this.record) return;
    [this.group, this.sibling] = [record.group, record.sibling];
    this.read();
  }

  filter(filters) {
    this.filters = filters;
    this.chosen = chosenRecords(this.records, filters);
    if (this.chosen.length && !this.chosen.includes(this.record)) [this.group, this.sibling] = [this.chosen[0].group, this.chosen[0].sibling];
    this.draw();
  }

  change(key, value) {
    this.view = { ...this.view, [key]: value };
    const top = this.reading.turns.scrollTop;
    this.read(this.turn);
    if (key !== "beside") this.reading.turns.scrollTop = top;
  }

  goTo(turn) {
    const last = (this.record?.turns.length ?? 0) - 1;
    this.turn = Math.max(0, Math.min(last, turn));
    if (last >= 0) this.reading.turn(this.turn);
    this.link();
  }

  toSibling(step) {
    if (!this.record) return;
    const siblings = this.records.siblings(this.record);
    this.choose(siblings[siblings.indexOf(this.record) + step]);
  }
}

const page = new Page();
listenToKeys(keyTable(page));
page.load();
