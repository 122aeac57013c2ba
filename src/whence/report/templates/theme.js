"use strict";
// In the head, so that a page in the reader's own choice of colours never flashes in the other.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("whence-theme");
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  } catch { /* storage may be forbidden for files; the system's choice then stands */ }
})();
