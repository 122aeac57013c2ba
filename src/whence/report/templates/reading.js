// Comforts of reading: long texts folded, tokens' scores at the pointer, the theme, jumping, copying, printing.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const root = document.documentElement;

  // --- long texts ------------------------------------------------------------------------------------------
  // All heights are read before anything changes, or every change would cost a new layout. What is inside closed
  // details has no height yet and has its turn when they are opened.
  const done = new WeakSet();
  const foldLongTexts = within => {
    const limit = 15 * parseFloat(getComputedStyle(root).fontSize);
    const tall = all(".long", within).filter(text => !done.has(text) && text.scrollHeight > limit * 1.3);
    for (const text of tall) {
      done.add(text);
      const button = document.createElement("button");
      button.type = "button";
      button.className = "unfold";
      const set = open => {
        text.classList.toggle("folded", !open);
        button.setAttribute("aria-expanded", open);
        button.textContent = open ? "Show less" : "Show more";
      };
      button.addEventListener("click", () => set(text.classList.contains("folded")));
      set(false);
      text.after(button);
    }
  };
  foldLongTexts(document);
  for (const details of all("details")) details.addEventListener("toggle", () => foldLongTexts(details));

  // --- a token's score -------------------------------------------------------------------------------------
  const tip = document.getElementById("tip");
  const showTip = event => {
    const token = event.target.closest?.(".t[title], .t[data-tip]");
    if (!token) { tip.hidden = true; return; }
    if (token.title) {  // or the browser would show its own a second later
      token.dataset.tip = token.title;
      token.removeAttribute("title");
    }
    tip.textContent = token.dataset.tip;
    tip.hidden = false;
    const box = token.getClientRects()[0];
    const left = Math.min(Math.max(4, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 4);
    tip.style.left = `${left}px`;
    tip.style.top = `${box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 5 : box.bottom + 5}px`;
  };
  addEventListener("pointerover", showTip);
  addEventListener("pointerdown", showTip);
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });

  // --- light and dark --------------------------------------------------------------------------------------
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    button.setAttribute("aria-pressed", dark());
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("whence-theme", root.dataset.theme); } catch { /* not kept, but applied */ }
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // --- where the reader is ---------------------------------------------------------------------------------
  const jump = document.getElementById("jump");
  jump.addEventListener("change", () => { location.hash = jump.value; });
  const places = [...jump.options].map(option => document.getElementById(option.value));
  const mark = () => {
    const passed = places.filter(place => place && place.getBoundingClientRect().top < innerHeight / 3);
    if (passed.length && document.activeElement !== jump) jump.value = passed.at(-1).id;
  };
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; mark(); });
  }, { passive: true });
  mark();

  // --- copying ---------------------------------------------------------------------------------------------
  document.getElementById("copy").addEventListener("click", async () => {
    const data = JSON.parse(document.getElementById("reproduce-data").textContent);
    const said = document.getElementById("copied");
    try {
      await navigator.clipboard.writeText(JSON.stringify(data, null, 2));
      said.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(document.getElementById("json"));
      said.textContent = "Selected: press the keys for copying.";
    }
  });

  // --- printing --------------------------------------------------------------------------------------------
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
