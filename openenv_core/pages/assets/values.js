// Values as they are read: text, tables, pictures, curves. Whatever stands in them, nothing becomes markup.

const MOST_ROWS = 100, MOST_COLUMNS = 32, MOST_DEPTH = 8, LONG_LIST = 32, SHORT_TEXT = 100;
const PICTURES = { iVBORw0KGgo: "png", "/9j/": "jpeg", R0lGOD: "gif", UklGR: "webp" };
const PICTURE = /^(?:data:image\/[a-z]+;base64,)?((iVBORw0KGgo|\/9j\/|R0lGOD|UklGR)[\w+/-]{32,}={0,2})$/;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isScalar = (value) => typeof value !== "object" || value === null;
const isNumbers = (list) => list.every((one) => typeof one === "number");
// Not Math.min(...list): a call takes about 100,000 arguments, and a flat picture is longer.
const rangeOf = (list) => list.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
const figure = (number) => (Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(6))));

function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A line through numbers, as wide as its place. */
function curve(numbers, words) {
  const [low, high] = rangeOf(numbers), span = high - low || 1;
  const last = Math.max(1, numbers.length - 1);
  const points = numbers.map((y, x) => `${((1000 * x) / last).toFixed(1)},${(100 - (100 * (y - low)) / span).toFixed(1)}`);
  if (points.length === 1) points.push(`1000,${points[0].split(",")[1]}`);
  return drawn("svg", { viewBox: "0 -6 1000 112", preserveAspectRatio: "none", class: "curve", role: "img", "aria-label": words },
    drawn("polyline", { points: points.join(" ") }));
}

/** A picture in base64 by its first bytes, whatever the key that it stands under; null where a text is none. */
function pictureOf(text) {
  const found = PICTURE.exec(text);
  if (!found) return null;
  const picture = make("img", { className: "picture", alt: "picture from the environment" });
  picture.onerror = () => picture.replaceWith(make("span", { className: "none", textContent: "a picture that cannot be shown" }));
  // Models' bytes have the alphabet of URLs, which a data URL does not take.
  picture.src = `data:image/${PICTURES[found[2]]};base64,${found[1].replaceAll("-", "+").replaceAll("_", "/")}`;
  return picture;
}

/** Rows of pixels, each of three or four numbers up to 255. */
function pixelsOf(rows) {
  const width = rows[0].length, depth = rows[0][0]?.length;
  const whole = (row) => Array.isArray(row) && row.length === width &&
    row.every((dot) => Array.isArray(dot) && dot.length === depth && dot.every((one) => one >= 0 && one <= 255));
  if (rows.length < 8 || width < 8 || (depth !== 3 && depth !== 4) || !rows.every(whole)) return null;
  const canvas = make("canvas", { className: "picture", width, height: rows.length });
  const bytes = new Uint8ClampedArray(4 * width * rows.length);
  rows.flat().forEach(([red, green, blue, alpha = 255], at) => bytes.set([red, green, blue, alpha], 4 * at));
  canvas.getContext("2d").putImageData(new ImageData(bytes, width, rows.length), 0, 0);
  return canvas;
}

function tableOf(head, rows, depth) {
  const cells = (row) => row.slice(0, MOST_COLUMNS).map((value) => make("td", { className: typeof value === "number" ? "number" : "" }, valueBox(value, depth + 1)));
  const body = rows.slice(0, MOST_ROWS).map((row) => make("tr", {}, ...cells(row)));
  const table = make("table", { className: head ? "table" : "table grid" });
  if (head) table.append(make("thead", {}, make("tr", {}, ...head.slice(0, MOST_COLUMNS).map((name) => make("th", { textContent: name, scope: "col" })))));
  table.append(make("tbody", {}, ...body));
  const box = make("div", { className: "wide" }, table);
  const more = rows.length - body.length, beside = (rows[0]?.length ?? 0) - MOST_COLUMNS;
  if (more > 0) box.append(make("p", { className: "none", textContent: `and ${counted(more, "row")} more` }));
  if (beside > 0) box.append(make("p", { className: "none", textContent: `and ${counted(beside, "column")} more` }));
  return box;
}

function listBox(list, depth) {
  if (!list.length) return make("span", { className: "none", textContent: "empty" });
  if (list.length === 1 && isObject(list[0])) return fieldsBox(list[0], depth);
  if (list.every((one) => isObject(one) && Object.values(one).every(isScalar))) {
    const names = [...new Set(list.flatMap(Object.keys))];
    return tableOf(names, list.map((one) => names.map((name) => one[name])), depth);
  }
  if (list.every((row) => Array.isArray(row) && row.length && row.length === list[0].length)) {
    const pixels = pixelsOf(list);
    if (pixels) return pixels;
    if (list.every((row) => row.every(isScalar))) return tableOf(null, list, depth);
  }
  if (list.every((one) => typeof one === "string") && list.some((one) => /\n|^ /.test(one))) return valueBox(list.map((one) => one.replace(/\n$/, "")).join("\n"), depth);
  if (list.every(isScalar)) {
    if (isNumbers(list) && list.length > LONG_LIST) {
      return make("div", {}, curve(list, `${list.length} numbers`), make("span", { className: "none", textContent: `${counted(list.length, "number")} from ${rangeOf(list).map(figure).join(" to ")}` }));
    }
    if (list.every((one) => String(one).length <= SHORT_TEXT)) {
      return make("span", { className: "chips" }, ...list.slice(0, MOST_ROWS).map((one) => make("span", {}, valueBox(one, depth + 1))),
        list.length > MOST_ROWS ? `and ${list.length - MOST_ROWS} more` : null);
    }
  }
  return make("ol", { className: "items" }, ...list.slice(0, MOST_ROWS).map((one) => make("li", {}, valueBox(one, depth + 1))));
}

const isBundle = (value) => Object.keys(value).length > 0 && Object.keys(value).every((name) => /^[a-z]+\/[\w.+-]+$/.test(name));

/** One thing in several forms, by their mime types: a picture before words, these before the rest. */
function bundleBox(bundle, depth) {
  const pictures = Object.values(bundle).filter((one) => typeof one === "string" && pictureOf(one));
  return valueBox(pictures[0] ?? bundle["text/plain"] ?? Object.values(bundle)[0], depth + 1);
}

/** An element that shows any value of JSON. */
function valueBox(value, depth = 0) {
  if (value === null || value === undefined) return make("span", { className: "none", textContent: "–" });
  if (typeof value === "number") return make("span", { className: "figure", textContent: figure(value) });
  if (typeof value === "boolean") return make("span", { className: "truth", textContent: value ? "yes" : "no" });
  if (typeof value === "string") {
    const picture = pictureOf(value);
    if (picture) return picture;
    if (!value) return make("span", { className: "none", textContent: "empty" });
    if (value.length <= SHORT_TEXT && !value.includes("\n")) return make("span", { textContent: value });
    return foldable(make("div", { className: "block" }, make("div", { className: "text", textContent: value })), value);
  }
  if (depth >= MOST_DEPTH) return make("div", { className: "text", textContent: JSON.stringify(value) });
  if (!Array.isArray(value) && isBundle(value)) return bundleBox(value, depth);
  return Array.isArray(value) ? listBox(value, depth) : fieldsBox(value, depth);
}

/** The fields of an object, one below the other. */
function fieldsBox(value, depth = 0, names = Object.keys(value)) {
  if (!names.length) return make("span", { className: "none", textContent: "empty" });
  const parts = names.flatMap((name) => [make("dt", { textContent: name.replaceAll("_", " "), title: name }), make("dd", {}, valueBox(value[name], depth + 1))]);
  return make("dl", { className: "fields" }, ...parts);
}
