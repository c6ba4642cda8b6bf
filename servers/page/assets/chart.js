// What an episode earned, step by step, and its other numbers.

const WIDE = 1000, HIGH = 260, MAX_CURVES = 6;

/** A bar for each step's reward, and a line through their sum. */
function rewardChart(rewards) {
  const sums = [];
  rewards.reduce((sum, one) => (sums.push(sum + one), sum + one), 0);
  const low = Math.min(0, ...sums, ...rewards), high = Math.max(0, ...sums, ...rewards), span = high - low || 1;
  const y = (value) => (HIGH * (high - value)) / span, width = WIDE / Math.max(rewards.length, 12);
  const bars = rewards.map((one, at) => drawn("rect", { x: at * width + width * 0.15, width: width * 0.7, y: y(Math.max(one, 0)), height: Math.abs(y(one) - y(0)), class: shade(one) },
    drawn("title", {}, `step ${at + 1}: ${signed(one)}`)));
  const points = [`0,${y(0)}`, ...sums.map((one, at) => `${at * width + width / 2},${y(one)}`)].join(" ");
  return drawn("svg", { viewBox: `0 -12 ${WIDE} ${HIGH + 24}`, preserveAspectRatio: "none", class: "rewards", role: "img", "aria-label": `rewards of ${counted(rewards.length, "step")}, ${signed(sums.at(-1))} in all` },
    drawn("line", { x1: 0, x2: WIDE, y1: y(0), y2: y(0) }), ...bars, drawn("polyline", { points }));
}

/** Curves of the numbers that observations have at every step. */
function numberCurves(observations) {
  const names = Object.keys(observations.at(-1) ?? {}).filter((name) =>
    !["reward", "done"].includes(name) && observations.every((one) => typeof one[name] === "number"));
  return names.filter((name) => new Set(observations.map((one) => one[name])).size > 1).slice(0, MAX_CURVES).map((name) => {
    const numbers = observations.map((one) => one[name]);
    return make("div", { className: "series" }, make("span", { textContent: name.replaceAll("_", " "), title: name }),
      curve(numbers, `${name}, step by step`), make("b", { textContent: figure(numbers.at(-1)) }));
  });
}
