// Light, dark, or as the system has it; remembered where the browser lets a page remember.

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // a page in a file may have no memory
  }
}

let theme = THEMES.includes(remembered()) ? remembered() : "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  byId("theme").textContent = { system: "◐ system", light: "☀ light", dark: "☾ dark" }[theme];
}

function nextTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // as above
  }
  applyTheme();
}

dark.addEventListener("change", applyTheme);
byId("theme").onclick = nextTheme;
applyTheme();
