// The list on the left. Only the rows in sight are on the page, so a few thousand cost what a screenful does.

const ROW_PX = 60;
const SPARE_ROWS = 8;

class List {
  constructor(box, rows, choose) {
    this.box = box;
    this.rows = rows;
    this.records = [];
    this.chosen = null;
    this.choose = choose;
    this.places = new Map();
    box.addEventListener("scroll", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(box);
    rows.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) choose(row.record);
    });
  }

  show(records) {
    this.records = records;
    this.places = new Map(records.map((record, place) => [record, place]));
    this.rows.style.height = `${records.length * ROW_PX}px`;
    this.#draw();
  }

  select(record) {
    this.chosen = record;
    const place = this.places.get(record);
    if (place !== undefined) {
      const top = place * ROW_PX, bottom = top + ROW_PX;
      if (top < this.box.scrollTop) this.box.scrollTop = top;
      else if (bottom > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = bottom - this.box.clientHeight;
    }
    this.#draw();
  }

  /** The record so many rows from the chosen one; the first where none of the list is chosen. */
  beside(step) {
    const place = this.places.get(this.chosen);
    if (place === undefined) return this.records[0] ?? null;
    return this.records[Math.min(this.records.length - 1, Math.max(0, place + step))];
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - SPARE_ROWS);
    const last = Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW_PX) + SPARE_ROWS;
    const shown = this.records.slice(first, last);
    this.rows.replaceChildren(...shown.map((record, n) => this.#row(record, first + n)));
    if (!this.records.length) this.rows.append(make("div", { className: "empty", textContent: "Nothing passes the filters." }));
    const active = this.rows.querySelector("[aria-selected=true]");
    if (active) this.box.setAttribute("aria-activedescendant", active.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  #row(record, place) {
    const before = this.records[place - 1];
    const row = make("div", { className: "row", id: `row-${record.group}-${record.sibling}`, role: "option" },
      make("div", {},
        make("span", { className: "where", textContent: `step ${whole(record.iteration)}${inEnvironment(record, " · ")} · group ${record.group}.${record.sibling}` }),
        make("span", { className: "space" }),
        make("span", { className: `reward ${shade(record.reward)}`, textContent: signed(record.reward) })),
      make("div", {},
        make("span", { className: `ending ${endingKind(record.ending)}`, textContent: endingWords(record.ending) }),
        make("span", { className: "facts", textContent: rowFacts(record) })),
      make("div", {}, make("span", { className: "last", textContent: lastAnswer(record) })));
    row.style.top = `${place * ROW_PX}px`;
    if (!before || before.group !== record.group) row.classList.add("first");
    row.ariaSelected = `${record === this.chosen}`;
    row.ariaPosInSet = `${place + 1}`;
    row.ariaSetSize = `${this.records.length}`;
    row.record = record;
    return row;
  }
}

function rowFacts(record) {
  const facts = [counted(record.turns.length, "turn")];
  if (record.tool_calls) facts.push(counted(record.tool_calls, "call"));
  if (record.trainedCount < record.count) facts.push(record.trainedCount ? "partly masked" : "masked");
  if (record.count) facts.push(counted(record.count, "token"), probability(record.meanProbability));
  return facts.join(" · ");
}

const MARKS = /<\/?tool_call>|<\|[^|]*\|>/g;

function lastAnswer(record) {
  const last = record.turns.at(-1);
  return last ? last.pieces.slice(0, 80).join("").replace(MARKS, " ").replace(/\s+/g, " ").trim().slice(0, 120) : "";
}
