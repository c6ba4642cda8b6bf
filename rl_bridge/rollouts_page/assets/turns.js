// Turns as cards: what was shown, what was answered.

/** How deep each turn is in the tree of an agent's calls; null where each one continues the turn before it, or none does. */
function callDepths(turns) {
  const depths = [], continued = new Set();
  for (const [place, { parent }] of turns.entries()) {
    if (parent === undefined) return null; // an older record
    if (parent === null) depths.push(place ? 1 : 0);
    else depths.push(depths[parent] + (continued.has(parent) ? 1 : 0));
    continued.add(parent);
  }
  const branches = turns.some(({ parent }, place) => place > 0 && parent !== place - 1);
  return branches && turns.some(({ parent }) => parent !== null) ? depths : null;
}

/** The tree of an agent's calls, a line each: whose words it answers, its tokens, whether it is trained. */
function callTree(record, go) {
  const depths = callDepths(record.turns);
  if (!depths) return [];
  const lines = record.turns.map((turn, place) => {
    const roles = splitRoles(wholeContext(turn)).map(({ role }) => role).filter(Boolean);
    const facts = [`turn ${place + 1}`, turn.parent === null ? "begins a chat" : `continues turn ${turn.parent + 1}`];
    if (roles.length) facts.push(roles.at(-1));
    if (!turn.plain) facts.push(counted(turn.tokens.length, "token"), turn.trained.some(([on]) => on) ? "trained" : "masked");
    const line = make("button", { type: "button", textContent: facts.join(" · ") });
    line.style.marginLeft = `${2 * depths[place]}em`;
    line.onclick = () => go(place);
    return line;
  });
  return [make("div", { id: "tree", role: "group", ariaLabel: "Calls" }, ...lines)];
}

/** Tokens that are put on the page at once; of longer trajectories the rest follows as it comes into sight. */
const AT_ONCE = 15000;
const LINE_PX = 21;

class Cards {
  constructor(view) {
    this.view = view;
    this.left = AT_ONCE;
    this.nearing = new IntersectionObserver((entries) => this.#near(entries), { rootMargin: "1200px" });
  }

  /** A card of one turn. */
  card(record, place, { parting = null, without = 0 } = {}) {
    const turn = record.turns[place];
    const card = make("article", { className: "turn", id: `turn-${record.sibling}-${place}` });
    card.record = record;
    card.turn = turn;
    card.place = place;
    const head = make("h3", {}, `turn ${place + 1}`);
    if (turn.fresh && place > 0) {
      head.append(make("span", { className: "begins", textContent: "a new training sample begins: the prompt does not continue" }));
    }
    card.append(head);
    for (const said of this.#context(turn).slice(without)) card.append(said);
    card.append(this.#answer(turn, parting));
    return card;
  }

  #context(turn) {
    const text = wholeContext(turn);
    const parts = this.view.raw ? [{ role: `${whole(turn.context_tokens)} tokens`, text }] : splitRoles(text);
    return parts.map(({ role, text }) => saidBox(role, text));
  }

  #answer(turn, parting) {
    const trained = turn.trained.reduce((sum, [on, number]) => sum + (on ? number : 0), 0);
    const box = make("div", { className: trained || turn.plain ? "answer" : "answer masked" });
    const fill = () => box.prepend(answerText(turn, this.view.colour, parting));
    if (this.left > 0) fill();
    else {
      box.fill = fill;
      box.style.minHeight = `${LINE_PX * Math.ceil(turn.pieces.join("").length / 90)}px`;
      this.nearing.observe(box);
    }
    this.left -= turn.tokens.length;
    box.append(make("footer", {}, ...answerFacts(turn, trained)));
    return box;
  }

  #near(entries) {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      this.nearing.unobserve(target);
      target.fill();
      target.style.minHeight = "";
    }
    if (this.view.filled) this.view.filled();
  }

  close() {
    this.nearing.disconnect();
  }
}

function saidBox(role, text) {
  const body = make("div", { className: "text" });
  if (role) body.append(make("span", { className: "role", textContent: role }));
  body.append(make("span", { textContent: text }));
  return foldable(make("div", { className: "said" }, body), text);
}

function answerFacts(turn, trained) {
  if (turn.plain) return [];
  const number = turn.tokens.length;
  const facts = [counted(number, "token")];
  if (trained < number) facts.push(trained ? `${whole(number - trained)} masked` : "masked: the loss does not see them");
  const mean = number ? Math.exp(turn.logprobs.reduce((sum, value) => sum + value, 0) / number) : 1;
  facts.push(`mean p ${probability(mean)}`);
  const versions = turn.versions.map(([version]) => version);
  if (versions.length) facts.push(`version ${[...new Set(versions)].join(", then ")}`);
  // Of one token nothing is cut off: no more was asked for.
  if (!turn.stopped && number > 1) facts.push("cut off by the length limit");
  return facts.map((fact) => make("span", { textContent: fact }));
}
