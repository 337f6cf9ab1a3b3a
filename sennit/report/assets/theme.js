"use strict";
// Light and dark: the system's choice until the button is pressed; nothing is stored.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
});
