// The tokens of an answer as coloured spans.

/** The bounds of the colours: a token is of the first whose probability it reaches. */
const PROBABILITIES = [0.99, 0.9, 0.75, 0.5, 0.25, 0.1, 0.03, 0.005, 0];
const COLOURS = ["probability", "mask", "version", "none"];
const VERSION_TINTS = 6;

function probabilityClass(logprob) {
  const p = Math.exp(logprob);
  return `p${PROBABILITIES.findIndex((bound) => p >= bound)}`;
}

function colourClass(colour, logprob, trained, version) {
  if (colour === "probability") return probabilityClass(logprob);
  if (colour === "mask") return trained ? "seen" : "unseen";
  if (colour === "version") return `v${version % VERSION_TINTS}`;
  return "";
}

/** What a turn's tokens are, one by one; made once. */
function tokenFacts(turn) {
  turn.facts ??= { trained: perToken(turn.trained), versions: perToken(turn.versions) };
  return turn.facts;
}

const SPECIAL = /^<\|[^|]+\|>$/;

/** The answer of a turn: a span a token, thoughts and calls of tools set apart. */
function answerText(turn, colour, parting) {
  if (turn.plain) return make("div", { className: "text", textContent: turn.answer });
  const { trained, versions } = tokenFacts(turn);
  const parts = answerParts(turn.pieces.join(""));
  const box = make("div", { className: "text" });
  let place = box, part = 0, at = 0;
  turn.pieces.forEach((piece, index) => {
    if (place !== box && at >= parts[part].to) {
      place = box;
      part += 1;
    }
    if (place === box && part < parts.length && at + piece.length > parts[part].from) {
      place = make("span", { className: parts[part].kind });
      if (parts[part].kind === "call") place.dataset.tool = parts[part].tool;
      box.append(place);
    }
    const span = document.createElement("span");
    span.textContent = piece;
    span.token = index;
    span.className = `tk ${colourClass(colour, turn.logprobs[index], trained[index], versions[index])}`;
    if (!trained[index]) span.classList.add("off");
    if (SPECIAL.test(piece.trim())) span.classList.add("special");
    if (index === parting) span.classList.add("parts");
    place.append(span);
    at += piece.length;
  });
  return box;
}

/** Which token is the first that differs from another trajectory's: {turn, token}; null where none does. */
function firstDifference(record, other) {
  if (record === other) return null;
  for (const [place, turn] of record.turns.entries()) {
    const theirs = other.turns[place]?.tokens ?? [];
    const token = turn.tokens.findIndex((id, index) => id !== theirs[index]);
    if (token >= 0) return { turn: place, token };
    if (theirs.length !== turn.tokens.length) return null;
  }
  return null;
}

/** What is said of a token that one points at. */
function tokenTip(turn, index) {
  const { trained, versions } = tokenFacts(turn);
  const p = probability(Math.exp(turn.logprobs[index]));
  return [
    make("b", { textContent: JSON.stringify(turn.pieces[index]) }),
    make("div", { textContent: `p ${p}, log p ${turn.logprobs[index].toFixed(4)}` }),
    make("div", { textContent: `token ${whole(index + 1)} of ${whole(turn.tokens.length)}, id ${turn.tokens[index]}` }),
    make("div", { textContent: `${trained[index] ? "trained" : "masked"}, sampled by version ${versions[index]}` }),
  ];
}

function legend(colour) {
  const sample = (name, words) => make("span", { className: name, textContent: words });
  if (colour === "probability") {
    const bounds = PROBABILITIES.map((bound, place) => sample(`p${place}`, bound ? `${bound * 100}%` : "less"));
    return [make("em", { textContent: "at least" }), ...bounds];
  }
  if (colour === "mask") return [sample("seen", "trained"), sample("unseen", "masked")];
  if (colour === "version") return [make("em", { textContent: "a tint for each version of the weights" })];
  return [];
}
