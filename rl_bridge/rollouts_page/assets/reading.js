// The pane on the right: one trajectory, or all of its group beside each other.

class Reading {
  /** `told` is called with what a click asks for: choose a sibling, change the view, be at a turn. */
  constructor(head, turns, tip, told) {
    this.head = head;
    this.turns = turns;
    this.tip = tip;
    this.told = told;
    this.cards = null;
    this.record = null;
    this.at = null;
    turns.addEventListener("mouseover", (event) => this.#point(event.target.closest(".tk")));
    turns.addEventListener("mouseleave", () => this.#point(this.at));
    turns.addEventListener("scroll", () => (this.tip.hidden = true));
    turns.addEventListener("click", (event) => this.#click(event));
  }

  show(record, records, view, words) {
    this.cards?.close();
    this.record = record;
    this.words = words;
    this.at = null;
    this.tip.hidden = true;
    this.cards = new Cards({ ...view, filled: () => this.mark(this.words) });
    const siblings = records.siblings(record);
    this.head.replaceChildren(
      headline(record, view, this.told.change),
      trajectoryFacts(record, siblings),
      siblingStrip(record, siblings, this.told.choose),
      colourBar(view, this.told.change));
    this.turns.classList.toggle("open", view.open);
    this.turns.classList.toggle("beside", view.beside);
    if (view.beside) this.turns.replaceChildren(...this.#beside(record, siblings));
    else {
      const cards = record.turns.map((_, place) => this.cards.card(record, place));
      this.turns.replaceChildren(...callTree(record, this.told.at), ...cards);
    }
    this.mark(words);
  }

  empty(words) {
    this.record = null;
    this.head.replaceChildren();
    this.turns.replaceChildren(make("div", { className: "empty", textContent: words }));
  }

  #beside(record, siblings) {
    const opening = record.turns[0]?.context;
    const shared = siblings.length > 1 && siblings.every((one) => one.turns[0]?.context === opening);
    const shown = [];
    const columns = make("div", { className: "columns" });
    for (const one of siblings) {
      const parts = firstDifference(one, record);
      const head = make("h3", { title: "Read this one" },
        `sibling ${one.sibling}`,
        make("span", { className: `reward ${shade(one.reward)}`, textContent: signed(one.reward) }),
        make("span", { className: `ending ${endingKind(one.ending)}`, textContent: endingWords(one.ending) }));
      head.onclick = () => this.told.choose(one);
      const column = make("div", { className: one === record ? "column chosen" : "column" }, head);
      one.turns.forEach((_, place) => {
        const card = this.cards.card(one, place, { parting: parts?.turn === place ? parts.token : null });
        if (shared && place === 0) {
          const said = [...card.querySelectorAll(".said")];
          if (one === siblings[0]) shown.push(make("div", { className: "shared" }, ...said));
          else said.forEach((box) => box.remove());
        }
        column.append(card);
      });
      columns.append(column);
    }
    return [...shown, columns];
  }

  mark(words) {
    this.words = words;
    this.found = markFound(this.turns, words);
  }

  /** Scroll to what was searched for, or to a turn. */
  seek(turn) {
    if (turn > 0) this.turn(turn);
    else if (this.found.length) {
      const place = this.found[0].getBoundingClientRect(), box = this.turns.getBoundingClientRect();
      if (place.bottom > box.bottom) this.turns.scrollTop += place.top - box.top - 120;
    } else this.turns.scrollTop = 0;
    this.turns.querySelector(".column.chosen > h3")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  turn(place) {
    const card = byId(`turn-${this.record.sibling}-${place}`);
    if (!card) return;
    this.turns.querySelector(".turn.here")?.classList.remove("here");
    card.classList.add("here");
    card.scrollIntoView({ block: "start" });
  }

  /** Go so many tokens on; at first to the first one of the turn. */
  token(step, turn) {
    const spans = [...this.turns.querySelectorAll(`#turn-${this.record.sibling}-${turn} .tk`)];
    if (!spans.length) return;
    const place = spans.indexOf(this.at);
    const next = spans[place < 0 ? 0 : Math.min(spans.length - 1, Math.max(0, place + step))];
    this.at?.classList.remove("at");
    this.at = next;
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    this.#point(next);
    // Readers of screens do not see where a tip appears. Who points with a mouse is not told of all that is passed over.
    byId("spoken").textContent = [...this.tip.children].map((fact) => fact.textContent).join(", ");
  }

  #click(event) {
    const card = event.target.closest(".turn");
    if (!card || event.target.closest("button") || !getSelection().isCollapsed) return;
    if (card.record === this.record) this.told.at(card.place);
  }

  #point(span) {
    if (!span) {
      this.tip.hidden = true;
      return;
    }
    this.tip.replaceChildren(...tokenTip(span.closest(".turn").turn, span.token));
    this.tip.hidden = false;
    const place = span.getBoundingClientRect(), size = this.tip.getBoundingClientRect();
    const above = place.top - size.height - 6;
    this.tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 8))}px`;
    this.tip.style.top = `${above < 4 ? place.bottom + 6 : above}px`;
  }
}
