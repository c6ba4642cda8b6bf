// Keys: [[keys], words, what is called with the key]. Each is in the table that `?` shows, so that none is forgotten there.

const KEY_NAMES = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };

function listenToKeys(table) {
  byId("keys").append(...table.map(([keys, words]) =>
    make("tr", {},
      make("td", {}, ...keys.flatMap((key) => [make("kbd", { textContent: KEY_NAMES[key] ?? key }), " "])),
      make("td", { textContent: words }))));
  byId("help-button").onclick = () => byId("help").showModal();
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.matches("input:not([type=checkbox], [type=radio]), select, textarea");
    if (typing && event.key !== "Escape") return;
    const entry = table.find(([keys]) => keys.includes(event.key));
    if (!entry) return;
    event.preventDefault();
    entry[2](event.key);
  });
}
