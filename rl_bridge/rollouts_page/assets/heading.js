// What stands above the turns: the facts of a trajectory, its siblings, how it is shown.

function fact(name, value, style = "") {
  return make("span", {}, `${name} `, make("b", { textContent: value, className: style }));
}

function trajectoryFacts(record, siblings) {
  const masked = record.count - record.trainedCount;
  const advantage = record.advantage === null ? "none: not trained" : signed(record.advantage);
  const plain = record.turns.every((turn) => turn.plain);
  const lag = record.iteration - 1 - record.version;
  return make("div", { className: "facts" },
    make("b", { className: `ending ${endingKind(record.ending)}`, textContent: endingWords(record.ending) }),
    fact("reward", signed(record.reward), shade(record.reward)),
    plain ? null : fact("advantage", advantage, shade(record.advantage ?? 0)),
    ...Object.entries(record.scores ?? {}).map(([path, score]) => fact(path, signed(score), shade(score))),
    fact("turns", whole(record.turns.length)),
    fact("tool calls", whole(record.tool_calls)),
    ...(plain ? [] : [
      fact("tokens", whole(record.count) + (masked ? `, ${whole(masked)} masked` : "")),
      fact("mean p", probability(record.meanProbability)),
      fact("least p", probability(record.leastProbability)),
      fact("version", `${record.version}` + (lag > 0 ? `, ${counted(lag, "update")} old` : "")),
    ]),
    fact("seed", `${record.seed}`),
    fact("group's mean", signed(siblings.reduce((sum, one) => sum + one.reward, 0) / siblings.length)));
}

function siblingStrip(record, siblings, choose) {
  const strip = make("div", { id: "siblings", role: "group", ariaLabel: "Siblings" });
  for (const one of siblings) {
    const button = make("button", { type: "button", className: shade(one.reward), textContent: signed(one.reward) });
    button.title = `sibling ${one.sibling}: ${endingWords(one.ending)}, ${counted(one.turns.length, "turn")}`;
    button.ariaPressed = `${one === record}`;
    button.onclick = () => choose(one);
    strip.append(button);
  }
  return strip;
}

/** What is read, and buttons for how; `change` is told a key of the view and its new value. */
function headline(record, view, change) {
  const toggle = (words, key, what, title) => {
    const button = make("button", { type: "button", id: `show-${what}`, title }, words, " ", make("kbd", { textContent: key }));
    button.ariaPressed = `${view[what]}`;
    button.onclick = () => change(what, !view[what]);
    return button;
  };
  return make("div", { className: "line bar" },
    make("h2", { textContent: `Step ${whole(record.iteration)}${inEnvironment(record, ", ")}, group ${record.group}, sibling ${record.sibling}` }),
    make("span", { className: "space" }),
    toggle("siblings", "s", "beside", "The siblings of the group beside each other"),
    toggle("template", "x", "raw", "Contexts as the chat template wrote them"),
    toggle("contexts", "o", "open", "Long contexts whole"));
}

/** What the colours of tokens mean, and which there are. */
function colourBar(view, change) {
  const colours = COLOURS.map((colour) => {
    const button = make("button", { type: "button", role: "radio", textContent: colour });
    button.ariaChecked = `${view.colour === colour}`;
    button.onclick = () => change("colour", colour);
    return button;
  });
  return make("div", { className: "line bar" },
    make("span", { role: "radiogroup", ariaLabel: "Colour", className: "line" }, ...colours),
    make("span", { id: "legend" }, ...legend(view.colour)));
}
