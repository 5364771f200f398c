// Runs before the first paint, so that the page never shows the other colours first.
(() => {
  let theme = "auto";
  try {
    theme = localStorage.getItem("baton-theme") ?? "auto";
  } catch {
    // Storage may be forbidden; the system's colours will do.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
