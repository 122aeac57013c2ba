"use strict";
// Questions go to the server, answers come back as lines of JSON, and are shown as pages in frames. What the server says is
// put on the page as text, never as markup.
(() => {
  const by = id => document.getElementById(id);
  const root = document.documentElement;
  const status = by("status"), error = by("error");
  let asked = [], shown = [], running = null;

  // --- the theme -------------------------------------------------------------------------------------------
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const nameTheme = () => {
    by("theme").textContent = dark() ? "Light" : "Dark";
    by("theme").setAttribute("aria-pressed", dark());
  };
  by("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("whence-theme", root.dataset.theme); } catch { /* not kept, but applied */ }
    nameTheme();
    for (const frame of document.querySelectorAll("iframe")) frame.contentDocument.documentElement.dataset.theme = root.dataset.theme;
  });
  nameTheme();

  // --- asking the server -----------------------------------------------------------------------------------
  const element = (name, text = "", properties = {}) => Object.assign(document.createElement(name), { textContent: text }, properties);
  const fail = message => { error.textContent = message; error.hidden = false; status.textContent = ""; };

  const send = (path, said, signal) => fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(said), signal,
  });

  // Hands every line to `take` as it comes; false where the server refused or was stopped.
  const lines = async (path, said, take) => {
    error.hidden = true;
    running?.abort();
    const own = running = new AbortController();
    try {
      const response = await send(path, said, own.signal);
      if (!response.ok) throw new Error((await response.json()).error);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        rest += value ?? "";
        const whole = rest.split("\n");
        rest = whole.pop();
        for (const line of whole) {
          const told = JSON.parse(line);
          if (told.error !== undefined) throw new Error(told.error);
          take(told);
        }
        if (done) return true;
      }
    } catch (problem) {
      if (problem.name !== "AbortError") {
        fail(problem instanceof TypeError ? "The server does not answer; is it still running?" : problem.message);
      }
      return false;
    } finally {
      if (running === own) running = null;
    }
  };

  // --- what was asked --------------------------------------------------------------------------------------
  const address = (number, form) => `answers/${number}/${form}`;

  const list = () => {
    by("none").hidden = asked.length > 0;
    by("asked").replaceChildren(...asked.map(one => {
      const item = element("li", "", { className: shown.includes(one.number) ? "shown" : "" });
      item.append(element("div", one.title, { dir: "auto" }));
      item.append(element("div", `${one.stage}, ${one.seconds} s; loss ${one.loss} nats${one.doubts.length ? "; in doubt" : ""}`, { className: "small muted" }));
      const links = element("div", "", { className: "links" });
      const show = element("button", "show", { type: "button" });
      show.addEventListener("click", () => open([one.number]));
      const beside = element("button", "beside", { type: "button", title: "Show next to the answer that is open" });
      beside.addEventListener("click", () => open([shown[0] ?? one.number, one.number]));
      links.append(show, beside);
      for (const [form, name] of [["page.html", "page"], ["scores.csv", "CSV"], ["viewer.jsonl", "JSONL"]]) {
        links.append(element("a", name, { href: address(one.number, form), target: form === "page.html" ? "_blank" : "", rel: "noopener" }));
      }
      for (const control of links.children) control.setAttribute("aria-label", `${control.textContent}: ${one.title}`);
      item.append(links);
      return item;
    }));
  };

  const refresh = async () => {
    const response = await fetch("answers");
    if (response.ok) asked = await response.json();
    list();
  };

  // --- answers, in frames ----------------------------------------------------------------------------------
  const frameOf = number => {
    const frame = element("iframe", "", { title: `Answer ${number}`, src: `${address(number, "page.html")}#q0` });
    frame.dataset.number = number;
    frame.addEventListener("load", () => {
      const inside = frame.contentDocument;
      if (root.dataset.theme) inside.documentElement.dataset.theme = root.dataset.theme;
      for (const entry of inside.querySelectorAll(".entry[data-index]")) {
        const button = inside.createElement("button");
        button.type = "button";
        button.className = "elsewhere";
        button.textContent = "What else did it influence?";
        button.addEventListener("click", () => elsewhere(Number(entry.dataset.index)));
        entry.querySelector(".numbers").append(button);
      }
    });
    return frame;
  };

  const open = numbers => {
    shown = [...new Set(numbers)];
    by("answer").replaceChildren(...shown.map(frameOf));
    list();
  };

  const ask = async said => {
    status.textContent = "Looking…";
    let last = null;
    const started = performance.now();
    const done = await lines("ask", said, told => {
      last = told;
      asked = [told, ...asked.filter(one => one.number !== told.number)];
      open([told.number]);
      status.textContent = `${told.stage[0].toUpperCase()}${told.stage.slice(1)} after ${((performance.now() - started) / 1000).toFixed(1)} s; looking closer…`;
    });
    if (done && last) status.textContent = `Done after ${((performance.now() - started) / 1000).toFixed(1)} s: ${last.stage}.`;
  };

  const elsewhere = async index => {
    const response = await fetch(`examples/${index}`);
    const found = response.ok ? await response.json() : [];
    const section = by("influenced");
    section.hidden = false;
    section.dataset.index = index;
    by("influenced-about").textContent = `Training example ${index}, and all that was asked so far, the strongest first:`;
    by("influenced-list").replaceChildren(...found.map(one => {
      const item = element("li");
      item.append(element("div", one.title, { dir: "auto" }));
      item.append(element("div", `${one.value >= 0 ? "helped" : "harmed"}: ${one.score} (${one.interval})${one.estimated ? ", estimated" : ""}`, { className: "small" }));
      return item;
    }));
    section.focus();
    section.scrollIntoView({ block: "nearest" });
  };
  by("alike").addEventListener("click", () => ask({ example: Number(by("influenced").dataset.index) }));

  // --- questions -------------------------------------------------------------------------------------------
  by("number-form").addEventListener("submit", event => {
    event.preventDefault();
    ask({ [by("which").value]: Number(by("number").value) });
  });
  if (by("text-form")) {
    const prompt = by("prompt"), completion = by("completion"), contrast = by("contrast");
    let first = "";
    const offer = () => { by("set-aside").hidden = !first || completion.value === first; };
    completion.addEventListener("input", offer);
    by("set-aside").addEventListener("click", () => { contrast.value = first; });
    by("complete").addEventListener("click", async () => {
      completion.value = "";
      status.textContent = "The model is writing…";
      by("stop").hidden = false;
      const done = await lines("complete", { prompt: prompt.value, limit: Number(by("limit").value) }, told => { completion.value += told.text; });
      by("stop").hidden = true;
      first = completion.value;
      offer();
      if (done) status.textContent = completion.value ? "Complete. Ask, or mark a part of it first." : "It had nothing to say.";
    });
    by("stop").addEventListener("click", () => { running?.abort(); status.textContent = "Stopped."; });
    by("text-form").addEventListener("submit", event => {
      event.preventDefault();
      const { value, selectionStart: from, selectionEnd: to } = completion;
      const marked = to > from && value.slice(from, to).trim();
      // what stands before the marked part is given, what comes after is not asked about
      const rather = contrast.value ? { contrast: contrast.value } : {};
      ask(marked
        ? { prompt: prompt.value + value.slice(0, from), completion: value.slice(from, to), ...rather }
        : { prompt: prompt.value, completion: value, ...rather });
    });
  }
  refresh();
})();
