// Where one is and what is filtered, as the part of the address behind the #: every view can be linked to.

const numberOrNull = (text) => (text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text));
const rangeText = (least, most) => (least === null && most === null ? "" : `${least ?? ""}..${most ?? ""}`);

function readRange(text) {
  const [least, most] = (text ?? "").split("..");
  return [numberOrNull(least ?? null), numberOrNull(most ?? null)];
}

/** {group, sibling, turn, beside, colour, raw, filters} as an address. */
function writeLink({ group, sibling, turn, view, filters }) {
  const link = new URLSearchParams();
  const say = (name, value) => value && link.set(name, value);
  if (group !== null) {
    link.set("group", group);
    link.set("sibling", sibling);
    if (turn > 0) link.set("turn", turn + 1);
  }
  say("view", view.beside && "siblings");
  say("colour", view.colour !== COLOURS[0] && view.colour);
  say("raw", view.raw && "1");
  say("q", filters.q);
  say("ending", filters.endings.join(","));
  say("reward", rangeText(filters.rewardMin, filters.rewardMax));
  say("step", rangeText(filters.stepMin, filters.stepMax));
  say("masked", filters.masked && "1");
  say("sort", filters.sort !== NO_FILTERS.sort && filters.sort);
  return `#${link}`;
}

/** The same back. What makes no sense is passed over. */
function readLink(hash) {
  const link = new URLSearchParams(hash.replace(/^#/, ""));
  const [rewardMin, rewardMax] = readRange(link.get("reward"));
  const [stepMin, stepMax] = readRange(link.get("step"));
  const colour = link.get("colour");
  return {
    group: numberOrNull(link.get("group")),
    sibling: numberOrNull(link.get("sibling")) ?? 0,
    turn: Math.max(0, Math.trunc(numberOrNull(link.get("turn")) ?? 1) - 1),
    view: {
      beside: link.get("view") === "siblings",
      colour: COLOURS.includes(colour) ? colour : COLOURS[0],
      raw: link.get("raw") === "1",
      open: false,
    },
    filters: {
      q: link.get("q") ?? "",
      endings: (link.get("ending") ?? "").split(",").filter(Boolean),
      rewardMin, rewardMax, stepMin, stepMax,
      masked: link.get("masked") === "1",
      sort: Object.hasOwn(ORDERS, link.get("sort")) ? link.get("sort") : NO_FILTERS.sort,
    },
  };
}
