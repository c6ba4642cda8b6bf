// Making elements, and words for numbers.

/** An element with properties and children; text stays text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en-US");
const signed = (number) => (number > 0 ? "+" : "") + Number(number.toFixed(4)).toLocaleString("en-US");
const counted = (number, word, words = `${word}s`) => `${whole(number)} ${number === 1 ? word : words}`;
const shade = (number) => (number > 0 ? "good" : number < 0 ? "bad" : "");

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
