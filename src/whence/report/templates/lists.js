"use strict";
// Sorting, filtering and searching the lists. Entries are only moved and hidden, never made anew.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const searchBox = document.getElementById("search");
  const MOST_HIGHLIGHTS = 5000;

  // Lower case and plain spaces, character by character: places found in it are places in the text.
  const fold = text => {
    const lower = text.toLowerCase();
    const same = lower.length === text.length
      ? lower
      : Array.from(text, c => (c.toLowerCase().length === c.length ? c.toLowerCase() : c)).join("");
    return same.replace(/\s/g, " ");
  };

  class Entry {
    constructor(element) {
      this.element = element;
      const { score, effect, index, baseline, unit, id, separated } = element.dataset;
      const number = text => (text === "" ? NaN : Number(text));
      this.keys = { score: number(score), effect: number(effect), index: number(index), baseline: number(baseline ?? ""), unit: number(unit ?? ""), id };
      this.separated = separated === "1";
      this.parts = all(".find", element).map(part => ({ part, text: fold(part.textContent) }));
      this.words = all(".word", element).map(part => fold(part.textContent));
    }
    says(term) { return this.parts.some(({ text }) => text.includes(term)); }
    get shown() { return !this.element.hidden; }
  }

  // Unknown values come last whichever way the order runs.
  const compare = (key, sign) => (one, other) => {
    const a = one.keys[key], b = other.keys[key];
    if (key === "id") {
      if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1);
      return sign * a.localeCompare(b, undefined, { numeric: true });
    }
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return sign * (a - b);
  };
  const DOWNWARDS = new Set(["score", "effect", "baseline", "unit"]);

  class Question {
    constructor(section) {
      this.section = section;
      this.control = name => section.querySelector(`.controls .${name}`);
      this.lists = all("ol.entries", section).map(ol => ({
        ol,
        nothing: ol.parentElement.querySelector(".nothing"),
        baseline: ol.closest("details"),
        entries: all(":scope > .entry", ol).map(element => new Entry(element)),
      }));
      this.control("sort-by").addEventListener("change", () => this.sort());
      this.control("direction").addEventListener("click", event => {
        const button = event.currentTarget;
        button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
        this.sort();
      });
      for (const name of ["by-word", "by-size", "by-separation"]) {
        this.control(name)?.addEventListener("input", () => refresh());
      }
      this.control("reset").addEventListener("click", () => {
        showEverything();
        this.control("sort-by").focus();
      });
    }

    get ranked() { return this.lists.filter(list => !list.baseline).flatMap(list => list.entries); }
    get others() { return this.lists.filter(list => list.baseline).flatMap(list => list.entries); }

    sort() {
      const key = this.control("sort-by").value;
      const reverse = this.control("direction").getAttribute("aria-pressed") === "true";
      for (const { ol, entries } of this.lists) {
        const sign = DOWNWARDS.has(key) !== reverse ? -1 : 1;
        const order = key ? [...entries].sort(compare(key, sign)) : reverse ? [...entries].reverse() : entries;
        ol.append(...order.map(entry => entry.element));
      }
    }

    filter(term) {
      const word = fold(this.control("by-word")?.value.trim() ?? "");
      const least = Number.parseFloat(this.control("by-size").value) || 0;
      const separated = this.control("by-separation").checked;
      for (const { nothing, entries, baseline } of this.lists) {
        for (const entry of entries) {
          const fits = (!term || entry.says(term))
            && (!word || entry.words.some(text => text.includes(word)))
            && !(Math.abs(entry.keys.score) < least)
            && (!separated || entry.separated);
          entry.element.hidden = !fits;
          entry.element.classList.toggle("lifted", fits && Boolean(term));
        }
        const left = entries.filter(entry => entry.shown).length;
        if (entries.length) nothing.hidden = left > 0;
        if (baseline) baseline.querySelector(".matches").textContent = left < entries.length ? `${left} of ${entries.length}` : "";
      }
      const left = this.ranked.filter(entry => entry.shown).length;
      this.control("reset").hidden = !(term || word || least || separated);
      this.control("shown").textContent = `${left} of ${this.ranked.length} shown`;
    }

    clear() {
      for (const name of ["by-word", "by-size"]) {
        const input = this.control(name);
        if (input) input.value = "";
      }
      this.control("by-separation").checked = false;
    }
  }

  // Where a term stands in an element, across the tokens it may be cut into.
  const places = (part, text, term) => {
    const nodes = [];
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    for (let start = 0; walker.nextNode(); start += walker.currentNode.length) nodes.push({ node: walker.currentNode, start });
    const ranges = [];
    let at = 0;
    const seek = place => {
      while (at + 1 < nodes.length && nodes[at + 1].start <= place) at += 1;
      return nodes[at];
    };
    for (let from = text.indexOf(term); from >= 0; from = text.indexOf(term, from + term.length)) {
      const range = document.createRange();
      const first = seek(from);
      range.setStart(first.node, from - first.start);
      const last = seek(from + term.length - 1);
      range.setEnd(last.node, from + term.length - last.start);
      ranges.push(range);
    }
    return ranges;
  };

  const highlight = term => {
    if (!globalThis.CSS?.highlights) return;
    const marks = new Highlight();
    if (term) {
      for (const question of questions) {
        for (const entry of [...question.ranked, ...question.others]) {
          for (const { part, text } of entry.parts) {
            if (!entry.shown || marks.size > MOST_HIGHLIGHTS || !text.includes(term)) continue;
            for (const range of places(part, text, term)) marks.add(range);
          }
        }
      }
    }
    CSS.highlights.set("search", marks);
  };

  const refresh = () => {
    const term = fold(searchBox.value.trim());
    for (const question of questions) question.filter(term);
    highlight(term);
    const ranked = questions.flatMap(question => question.ranked);
    const others = questions.flatMap(question => question.others).filter(entry => entry.shown).length;
    document.getElementById("found").textContent = !term ? ""
      : `${ranked.filter(entry => entry.shown).length} of ${ranked.length} examples`
        + (others ? `, ${others} in other rankings` : "");
    next = 0;
  };

  const showEverything = () => {
    searchBox.value = "";
    for (const question of questions) question.clear();
    refresh();
  };

  const show = element => {
    element.closest("details")?.setAttribute("open", "");
    element.scrollIntoView({ block: "center" });
    element.focus({ preventScroll: true });
  };

  let next = 0;
  const questions = all("section.question").map(section => new Question(section));
  searchBox.addEventListener("input", refresh);
  searchBox.addEventListener("keydown", event => {
    if (event.key === "Escape") { searchBox.value = ""; refresh(); }
    if (event.key !== "Enter" || !searchBox.value.trim()) return;
    const visible = questions.flatMap(question => all(".entry:not([hidden])", question.section));
    if (!visible.length) return;
    // The focus stays in the box, so that Enter again leads to the next.
    const entry = visible[next % visible.length];
    next += 1;
    entry.closest("details")?.setAttribute("open", "");
    entry.scrollIntoView({ block: "center" });
    for (const old of all(".entry.current")) old.classList.remove("current");
    entry.classList.add("current");
  });

  // A link to an entry leads there even if a filter hides it or it is folded away.
  const follow = () => {
    const target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    if (!target?.matches(".entry")) return;
    if (target.hidden) showEverything();
    show(target);
  };
  addEventListener("hashchange", follow);
  refresh();  // a browser that goes back may have kept what was typed
  for (const question of questions) question.sort();
  follow();
})();
