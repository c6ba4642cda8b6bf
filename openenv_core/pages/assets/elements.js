// Making elements, and words for numbers.

/** An element with properties and children; text stays text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en-US");
const signed = (number) => Number.isNaN(number) ? "unscored" : (number > 0 ? "+" : "") + Number(number.toFixed(4)).toLocaleString("en-US");
const counted = (number, word, words = `${word}s`) => `${whole(number)} ${number === 1 ? word : words}`;
const shade = (number) => (number > 0 ? "good" : number < 0 ? "bad" : "");

const LONG_TEXT = 900;

/** A box with a text in it: a long one shows its beginning, and a button the rest. */
function foldable(box, text) {
  if (text.length > LONG_TEXT || text.split("\n").length > 8) {
    box.classList.add("long");
    const words = `all ${whole(text.length)} characters`;
    const more = make("button", { type: "button", className: "more", textContent: words });
    more.onclick = () => {
      more.textContent = box.classList.toggle("opened") ? "less" : words;
    };
    box.append(more);
  }
  return box;
}
