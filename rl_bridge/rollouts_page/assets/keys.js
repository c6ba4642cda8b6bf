// What keys do here.

function keyTable(page) {
  const nextColour = () => COLOURS[(COLOURS.indexOf(page.view.colour) + 1) % COLOURS.length];
  return [
    [["j", "ArrowDown"], "next trajectory", () => page.choose(page.list.beside(1))],
    [["k", "ArrowUp"], "previous trajectory", () => page.choose(page.list.beside(-1))],
    [["PageDown"], "ten on", () => page.choose(page.list.beside(10))],
    [["PageUp"], "ten back", () => page.choose(page.list.beside(-10))],
    [["Home"], "first of the list", () => page.choose(page.list.beside(-Infinity))],
    [["End"], "last of the list", () => page.choose(page.list.beside(Infinity))],
    [["]"], "next sibling", () => page.toSibling(1)],
    [["["], "previous sibling", () => page.toSibling(-1)],
    [["n"], "next turn", () => page.goTo(page.turn + 1)],
    [["p"], "previous turn", () => page.goTo(page.turn - 1)],
    [["ArrowRight"], "next token of the turn, with its figures", () => page.record && page.reading.token(1, page.turn)],
    [["ArrowLeft"], "previous token", () => page.record && page.reading.token(-1, page.turn)],
    [["s"], "siblings beside each other, or one alone", () => page.change("beside", !page.view.beside)],
    [["c"], "next colour: probability, mask, version, none", () => page.change("colour", nextColour())],
    [["o"], "whole contexts", () => page.change("open", !page.view.open)],
    [["x"], "contexts as the template wrote them", () => page.change("raw", !page.view.raw)],
    [["/"], "search", () => byId("q").select()],
    [["Escape"], "leave the search", () => byId("list").focus()],
    [["t"], "light, dark, or as the system has it", nextTheme],
    [["?"], "this help", () => byId("help").showModal()],
  ];
}
