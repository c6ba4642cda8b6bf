// What the list shows, and in which order.

const ORDERS = {
  newest: ["newest first", (a, b) => b.iteration - a.iteration],
  oldest: ["oldest first", (a, b) => a.iteration - b.iteration],
  best: ["highest reward", (a, b) => b.reward - a.reward],
  worst: ["lowest reward", (a, b) => a.reward - b.reward],
  longest: ["most tokens", (a, b) => b.count - a.count],
  calls: ["most tool calls", (a, b) => b.tool_calls - a.tool_calls],
  unlikely: ["lowest mean p", (a, b) => a.meanProbability - b.meanProbability],
};
const BARS = 24;

const NO_FILTERS = Object.freeze({
  q: "", endings: [], rewardMin: null, rewardMax: null, stepMin: null, stepMax: null, masked: false, sort: "newest",
});

const within = (value, least, most) => (least === null || value >= least) && (most === null || value <= most);

/** Whether a record passes; what is named by `but` is not asked. */
function passes(record, filters, but = "") {
  if (but !== "endings" && filters.endings.length && !filters.endings.includes(record.ending)) return false;
  if (but !== "reward" && !within(record.reward, filters.rewardMin, filters.rewardMax)) return false;
  if (!within(record.iteration, filters.stepMin, filters.stepMax)) return false;
  if (filters.masked && record.trainedCount === record.count) return false;
  return !filters.q || searchedText(record).includes(filters.q.toLowerCase());
}

/** The records that pass, in the order asked for; siblings stay in theirs. */
function chosenRecords(records, filters) {
  const order = ORDERS[filters.sort][1];
  const chosen = records.all.filter((record) => passes(record, filters));
  return chosen.sort((a, b) => order(a, b) || a.iteration - b.iteration || a.group - b.group || a.sibling - b.sibling);
}

/** Bars of the rewards: [{from, to, all, chosen}], one a value where there are few. */
function rewardBars(records, filters) {
  const rewards = [...new Set(records.all.map((record) => record.reward))].sort((a, b) => a - b);
  if (!rewards.length) return [];
  const least = rewards[0], most = rewards.at(-1);
  const few = rewards.length <= BARS;
  const width = (most - least) / BARS;
  const bars = few
    ? rewards.map((value) => ({ from: value, to: value, all: 0, chosen: 0 }))
    : Array.from({ length: BARS }, (_, n) => ({ from: least + n * width, to: least + (n + 1) * width, all: 0, chosen: 0 }));
  const place = few
    ? (reward) => rewards.indexOf(reward)
    : (reward) => Math.min(BARS - 1, Math.floor((reward - least) / width));
  for (const record of records.all) {
    const bar = bars[place(record.reward)];
    bar.all += 1;
    if (passes(record, filters, "reward")) bar.chosen += 1;
  }
  return bars;
}

/** How many of each ending pass all else. */
function endingCounts(records, filters) {
  const counts = new Map(records.all.map((record) => [record.ending, 0]));
  for (const record of records.all) {
    if (passes(record, filters, "endings")) counts.set(record.ending, counts.get(record.ending) + 1);
  }
  return [...counts].sort(([a], [b]) => (a < b ? -1 : 1));
}
