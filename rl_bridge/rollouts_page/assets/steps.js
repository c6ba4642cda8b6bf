// Mean rewards over the steps, as a curve that one drags a range on.

const CURVE = { width: 1000, height: 100 };

/** [{step, mean, count}] of the records that pass all filters but the range of steps. */
function stepMeans(records, filters) {
  const sums = new Map();
  for (const record of records.all) {
    if (!passes(record, { ...filters, stepMin: null, stepMax: null })) continue;
    const sum = sums.get(record.iteration) ?? { step: record.iteration, total: 0, count: 0 };
    sum.total += record.reward;
    sum.count += 1;
    sums.set(record.iteration, sum);
  }
  const steps = [...sums.values()].sort((a, b) => a.step - b.step);
  return steps.map(({ step, total, count }) => ({ step, mean: total / count, count }));
}

class Curve {
  /** `chosen` is told the first and the last step of a range, or two nulls. */
  constructor(svg, words, chosen) {
    this.svg = svg;
    this.words = words;
    this.chosen = chosen;
    this.means = [];
    this.began = null;
    svg.addEventListener("pointerdown", (event) => {
      svg.setPointerCapture(event.pointerId);
      this.began = this.#step(event);
    });
    svg.addEventListener("pointermove", (event) => this.#point(event));
    svg.addEventListener("pointerleave", () => (words.textContent = ""));
    svg.addEventListener("pointerup", (event) => this.#end(event));
    svg.addEventListener("pointercancel", () => (this.began = null));
  }

  show(records, filters) {
    this.means = stepMeans(records, filters);
    this.least = records.all.reduce((least, record) => Math.min(least, record.iteration), Infinity);
    this.most = records.all.reduce((most, record) => Math.max(most, record.iteration), -Infinity);
    const one = !(this.most > this.least);
    this.svg.parentElement.hidden = one;
    if (one) return;
    const means = this.means.map(({ mean }) => mean);
    const low = Math.min(...means), high = Math.max(...means);
    const y = (mean) => CURVE.height - 6 - ((mean - low) / (high - low || 1)) * (CURVE.height - 12);
    const points = this.means.map(({ step, mean }) => `${this.#x(step)},${y(mean)}`).join(" ");
    this.svg.querySelector("polyline").setAttribute("points", points);
    this.#band(filters.stepMin, filters.stepMax);
  }

  #x(step) {
    return ((step - this.least) / (this.most - this.least)) * CURVE.width;
  }

  #step(event) {
    const box = this.svg.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    return Math.round(this.least + share * (this.most - this.least));
  }

  #band(first, last) {
    const band = this.svg.querySelector("rect");
    const from = this.#x(Math.max(first ?? this.least, this.least)), to = this.#x(Math.min(last ?? this.most, this.most));
    band.setAttribute("x", from);
    band.setAttribute("width", Math.max(0, first === null && last === null ? 0 : Math.max(3, to - from)));
  }

  #point(event) {
    const step = this.#step(event);
    if (this.began !== null) this.#band(Math.min(this.began, step), Math.max(this.began, step));
    const near = this.means.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a), this.means[0]);
    if (near) this.words.textContent = `step ${whole(near.step)}: mean ${signed(near.mean)} of ${whole(near.count)}`;
  }

  #end(event) {
    if (this.began === null) return;
    const step = this.#step(event), began = this.began;
    this.began = null;
    if (step === began) this.chosen(null, null);
    else this.chosen(Math.min(began, step), Math.max(began, step));
  }
}
