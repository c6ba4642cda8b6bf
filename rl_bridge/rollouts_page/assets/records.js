// Lines of JSON into records, and what the list, the filters and the heading say of each.

/** A probability to two digits that mean something. */
function probability(p) {
  if (p >= 0.9995) return "100%";
  if (p >= 0.1) return `${(100 * p).toFixed(1)}%`;
  if (p >= 0.0001) return `${(100 * p).toPrecision(2)}%`;
  return p.toExponential(1);
}

/** An ending as words, and what kind of ending it is: the first word of its name. */
const endingWords = (ending) => ending.replaceAll("_", " ");
const endingKind = (ending) => ending.split("_")[0];

const ANSWERED = Symbol("searched text");

/** Whether runs say something of so many tokens. */
const runsOver = (runs, tokens) => runs.reduce((sum, [, number]) => sum + number, 0) === tokens;

/** Whether all that the page shows of a turn is there; what is no turn may throw. */
function isTurn(turn) {
  if (typeof turn.answer === "string") {
    // Of an evaluation: text whose tokens nobody knows.
    Object.assign(turn, { plain: true, pieces: [turn.answer], tokens: [], logprobs: [], trained: [], versions: [], context_tokens: 0 });
    return typeof turn.context === "string";
  }
  const number = turn.tokens.length;
  return typeof turn.context === "string" && turn.pieces.length === number && turn.logprobs.length === number &&
    turn.pieces.every((piece) => typeof piece === "string") && turn.logprobs.every(Number.isFinite) &&
    runsOver(turn.trained, number) && runsOver(turn.versions, number);
}

/** A record of one line; null where the line is none. */
function readRecord(line) {
  let record;
  try {
    record = JSON.parse(line);
    if (record.reward === null) return record;
    if (!Number.isFinite(record.reward) || typeof record.ending !== "string" || !record.turns.every(isTurn)) return null;
  } catch {
    return null; // one line that is none is no reason to show none
  }
  let tokens = 0, trained = 0, surprise = 0, least = 0;
  for (const turn of record.turns) {
    tokens += turn.tokens.length;
    for (const [on, number] of turn.trained) if (on) trained += number;
    for (const logprob of turn.logprobs) {
      surprise -= logprob;
      if (logprob < least) least = logprob;
    }
  }
  record.count = tokens;
  record.trainedCount = trained;
  // The geometric mean: what the answers' probability is the power of.
  record.meanProbability = tokens ? Math.exp(-surprise / tokens) : 1;
  record.leastProbability = Math.exp(least);
  return record;
}

/** The name of a record's environment behind what stands before it; nothing in a run on one. */
const inEnvironment = (record, before) => (record.environment ? `${before}${record.environment}` : "");

/** Its environment's name, and everything that the policy was shown and answered, in lower case; remembered, because typing asks again and again. */
function searchedText(record) {
  if (record[ANSWERED] === undefined) {
    const parts = record.turns.flatMap((turn) => [turn.context, turn.pieces.join("")]);
    record[ANSWERED] = [record.environment, ...parts].join("\n").toLowerCase();
  }
  return record[ANSWERED];
}

/** (value, number) one after the other, as one value a token. */
function perToken(runs) {
  const values = [];
  for (const [value, number] of runs) for (let n = 0; n < number; n++) values.push(value);
  return values;
}

/** All that was recorded, by trajectory and by group. */
class Records {
  constructor() {
    this.all = [];
    this.groups = new Map();
    this.unreadable = 0;
    this.unscored = 0;
  }

  add(line) {
    if (!line) return;
    const record = readRecord(line);
    if (record === null) {
      this.unreadable += 1;
      return;
    }
    if (record.reward === null) {
      this.unscored += 1; // no zero, in no mean
      return;
    }
    this.all.push(record);
    if (!this.groups.has(record.group)) this.groups.set(record.group, []);
    this.groups.get(record.group).push(record);
  }

  siblings(record) {
    return this.groups.get(record.group);
  }

  find(group, sibling) {
    const siblings = this.groups.get(group) ?? [];
    return siblings.find((one) => one.sibling === sibling) ?? siblings[0] ?? null;
  }
}

const SLICE_MS = 30;
const breathe = () => new Promise((resolve) => setTimeout(resolve));

/** The records that stand in the page; `progress` is told how many there are. */
async function loadRecords(source, progress) {
  const records = new Records();
  let since = performance.now();
  const take = async (line) => {
    records.add(line);
    if (performance.now() - since > SLICE_MS) {
      progress(records.all.length);
      await breathe();
      since = performance.now();
    }
  };
  for await (const line of source) await take(line);
  return records;
}

async function* embeddedLines(element) {
  const text = element.textContent;
  element.textContent = "";
  for (let begin = 0; begin < text.length; ) {
    const end = text.indexOf("\n", begin);
    const line = end < 0 ? text.slice(begin) : text.slice(begin, end);
    yield line.trim();
    begin = end < 0 ? text.length : end + 1;
  }
}
