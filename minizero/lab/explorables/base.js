// What the explorables share. It stands before the module of each.
//
// One module serves two hosts. In Jupyter it is an anywidget, and `model` is the
// widget's; in a page `model` is the stand-in that page.js makes over the stored state.

const LOOK = `
  :host { all: initial; display: block; container-type: inline-size;
    color-scheme: inherit; color: inherit; font: inherit; }
  * { box-sizing: border-box; }
  .box { font-size: 14px; line-height: 1.45; padding: 14px 16px; margin: 0;
    border: 1px solid color-mix(in srgb, currentColor 28%, transparent);
    border-radius: 8px; }
  .controls { display: grid; gap: 12px 28px;
    grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); }
  label { display: block; }
  .name { display: flex; flex-wrap: wrap; justify-content: space-between;
    gap: 0 12px; font-weight: 600; margin-bottom: 3px; }
  input, select, textarea, button { font: inherit; color: inherit;
    accent-color: #2f86c8; }
  input[type="range"] { appearance: none; display: block; width: 100%; height: 24px;
    margin: 3px 0; touch-action: pan-y;
    background: linear-gradient(color-mix(in srgb, currentColor 60%, transparent) 0 0)
      center / 100% 4px no-repeat; }
  input::-webkit-slider-thumb { appearance: none; width: 20px; height: 20px;
    border-radius: 50%; background: #2f86c8; }
  input::-moz-range-thumb { width: 20px; height: 20px; border: 0;
    border-radius: 50%; background: #2f86c8; }
  input[type="text"], select, textarea, button {
    background: color-mix(in srgb, currentColor 6%, transparent); padding: 3px 8px;
    border: 1px solid color-mix(in srgb, currentColor 62%, transparent);
    border-radius: 5px; min-height: 30px; }
  a { color: light-dark(#0460a9, #78b8f0); }
  option { background: Canvas; color: CanvasText; }
  button { cursor: pointer; }
  :focus-visible { outline: 2px solid #2f86c8; outline-offset: 2px; }
  [aria-invalid="true"] { border: 2px solid #cf5a2b; }
  .chart { margin-top: 14px; padding-top: 12px;
    border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
  .key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 6px; }
  .swatch { display: inline-block; width: 14px; height: 14px; margin-right: 6px;
    vertical-align: -2px; }
  .bars { display: grid; grid-template-columns: max-content 1fr max-content;
    gap: 8px 10px; align-items: center; }
  .bars .row { display: contents; }
  .bar { display: flex; height: 22px; min-width: 0; }
  .bar div { flex: none; }
  .bar div, .swatch, .paint { forced-color-adjust: none; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  .bar div, .swatch { outline: 1px solid
    color-mix(in srgb, CanvasText 60%, transparent); outline-offset: -1px; }
  .after { text-align: right; font-weight: 600; font-variant-numeric: tabular-nums; }
  .words { margin: 12px 0 0; min-height: 2lh; }
  svg { display: block; width: 100%; height: auto; overflow: visible; user-select: none;
    font-size: 13px; fill: currentColor; }
  .bold { font-weight: 600; }
  .halo { stroke: Canvas; stroke-width: 4; paint-order: stroke; }
  .tools { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: start;
    margin-top: 12px; font-size: 13px; }
  .tools > a, summary { line-height: 30px; cursor: pointer; }
  .tools details[open] { flex-basis: 100%; }
  .numbers { overflow-x: auto; }
  .numbers table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  .numbers :is(th, td) { padding: 3px 10px 3px 0; text-align: right; white-space: nowrap;
    border-bottom: 1px solid color-mix(in srgb, currentColor 28%, transparent); }
  .numbers :is(th:first-child, caption) { text-align: left; }
  figcaption { display: none; margin-top: 8px; font-size: 13px; }
  @media (pointer: coarse) {
    input[type="range"] { height: 32px; }
    input::-webkit-slider-thumb { width: 28px; height: 28px; }
    input[type="text"], select, button { min-height: 40px; }
    label:has(> input[type="checkbox"]) { min-height: 32px; }
  }
  @media (prefers-reduced-motion: reduce) {
    * { transition: none !important; animation: none !important; }
  }
  @media (forced-colors: active) {
    input[type="range"] { appearance: auto; }
    input::-webkit-slider-thumb { appearance: auto; }
  }
  @media print {
    :host { color-scheme: light; break-inside: avoid; }
    .box { color: black; background: white; }
    .controls, .line, .tools, input, select, button, textarea { display: none !important; }
    .chart { border-top: 0; }
    figcaption { display: block; }
  }
`;

/** An element with attributes and children; "on..." attributes are listeners. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** At most four digits, two of them decimals: 112, 38.5, 26.25. */
function short(number) {
  const digits = Math.max(0, 4 - String(Math.trunc(Math.abs(number))).length);
  return number.toLocaleString("en-US", { maximumFractionDigits: Math.min(digits, 2) });
}

/** A number in the largest of the units that is not above it. */
function scaled(number, units) {
  const [unit, size] = units.find(([, least]) => number >= least) ?? units.at(-1);
  return short(number / size) + unit;
}

/** Bytes in decimal units, as Python's `amount`. */
const amount = (bytes) =>
  scaled(bytes, [[" TB", 1e12], [" GB", 1e9], [" MB", 1e6], [" kB", 1e3], [" B", 1]]);

/** Parameters of a model: 7B, 0.35B, 1T. */
const billions = (n) => scaled(n, [["T", 1e12], ["B", 1e9]]);

/** Layers of a GPT of about that size. */
const layersOf = (n) => Math.max(1, Math.round((n / (12 * 128 ** 2)) ** (1 / 3)));

// How the place of a slider stands for a value.
const STEPS = { step: 1, at: (value) => value, of: (place) => place };
const TWOS = { step: 1, at: Math.log2, of: (place) => 2 ** place };
const TENS = {
  step: 0.05, at: Math.log10, of: (place) => Number((10 ** place).toPrecision(2)),
};
const FINE = {
  step: 0.01, at: Math.log10, of: (place) => Number((10 ** place).toPrecision(3)),
};

/** Change a value as the reader does: Python hears of it too. */
function put(model, name, value) {
  model.set(name, value);
  model.save_changes();
}

/** A range input for a value; least and most are places on its scale. */
function range(model, name, title, [least, most, scale], show) {
  const input = make("input", {
    type: "range", min: least, max: most, step: scale.step, "aria-label": title,
    oninput: () => put(model, name, scale.of(input.valueAsNumber)),
  });
  const update = () => {
    input.value = scale.at(model.get(name));
    input.setAttribute("aria-valuetext", show(model.get(name)));
  };
  return { box: input, update };
}

/** A choice under its title; options are [value, text]. */
function choice(title, options, chosen) {
  const select = make("select", { onchange: () => chosen(options[select.selectedIndex][0]) },
    ...options.map(([, text]) => make("option", {}, text)));
  const box = make("label", {}, make("span", { class: "name" }, title), select);
  const show = (value) => {
    select.selectedIndex = options.findIndex(([one]) => one === value);
  };
  return { box, select, show };
}

/** A box with a drawing in it: [box, drawing]. */
function canvas(inside = "") {
  const box = make("div");
  box.innerHTML = `<svg role="img">${inside}</svg>`;
  return [box, box.firstChild];
}

/** Pressing on a drawing and dragging: `to` gets each event, and whether it is the first. */
function drag(svg, to) {
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    to(event, true);
  });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) to(event, false); });
}

/** A button that plays: `step` gets the seconds since the last one, and says whether it
 *  goes on. Who has asked for less motion is shown one step a second. */
function playing(step) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let ticking = 0;
  const stop = () => {
    clearInterval(ticking);
    ticking = 0;
    button.textContent = "Play";
  };
  const start = () => {
    let last = performance.now();
    button.textContent = "Pause";
    ticking = setInterval(() => {
      const since = (performance.now() - last) / 1000;
      if (calm.matches && since < 1) return;
      last = performance.now();
      if (!button.isConnected || !step(since, calm.matches)) stop();
    }, 40);
  };
  const button = make("button", { type: "button", "aria-label": "play",
    onclick: () => (ticking ? stop() : start()) }, "Play");
  return { button, stop, on: () => ticking !== 0 };
}

/** Sliders under their names and values, by name: [title, places, text of a value]. */
function sliders(model, specs) {
  const all = Object.entries(specs).map(([name, [title, places, show]]) => {
    const shown = make("output");
    const { box, update } = range(model, name, title, places, show);
    return {
      box: make("label", {},
        make("span", { class: "name" }, make("span", {}, title), shown), box),
      update: () => {
        update();
        shown.textContent = show(model.get(name));
      },
    };
  });
  const box = make("div", { class: "controls" }, ...all.map((one) => one.box));
  return { box, update: () => all.forEach((one) => one.update()) };
}

/** What is drawn in this colour has this background, and stripes where Python asks: with
 *  nothing under them they have the text's colour, to be seen on a dark page, too. */
function fill({ colour, stripes }) {
  const ink = colour === "transparent" ? "color-mix(in srgb, CanvasText 45%, transparent)"
    : stripes;
  const over = `repeating-linear-gradient(135deg, ${ink} 0 1.5px, transparent 1.5px 7px)`;
  return stripes ? `${over}, ${colour}` : colour;
}

/** The names of a palette, each beside its colour. */
function key(palette) {
  return make("div", { class: "key" }, ...Object.entries(palette).map(([name, look]) =>
    make("span", {},
      make("span", { class: "swatch", style: `background: ${fill(look)}` }), name)));
}

/** A row: a title, a bar in the colours of a palette, and a text at the end. */
function row(palette, say) {
  const title = make("span");
  const bar = make("div", { class: "bar", role: "img" });
  const after = make("span", { class: "after" });
  const box = make("div", { class: "row" }, title, bar, after);
  /** parts: [name, number] from left to right; `whole` would fill the row. */
  const update = (name, parts, whole, text) => {
    const there = parts.filter(([, number]) => number > 0);
    const words = there.map(([part, number]) => `${part} ${say(number)}`);
    title.textContent = name;
    after.textContent = text;
    bar.replaceChildren(...there.map(([part, number], i) => make("div", {
      title: words[i],
      style: `background: ${fill(palette[part])}; width: ${(100 * number) / whole}%`,
    })));
    bar.setAttribute("aria-label", words.join(", ") || "nothing");
    box.dataset.parts = JSON.stringify(parts);
  };
  return { box, title, update };
}

/** What a control is set to, in words; empty for one that another one repeats. */
function told(control) {
  const named = control.closest("label")?.querySelector(".name > span, .name")
    ?? control.closest("label");
  const group = control.closest("fieldset")?.querySelector("legend").textContent;
  const name = [group, control.ariaLabel ?? named.textContent].filter(Boolean).join(", ");
  const value = control.type === "checkbox" ? (control.checked ? "yes" : "no")
    : control.selectedOptions?.[0]?.textContent ?? control.getAttribute("aria-valuetext");
  return `${name}: ${value}`;
}

/** The numbers behind the drawing as a table, drawn while it is open.
 *  head: a title a column; rows: a name, then numbers; say: writes a number, given
 *  its place in the row. */
function numbersTable(title, { head, rows, say }) {
  const inside = make("div", { class: "numbers", tabindex: 0, role: "region",
    "aria-label": `${title}: numbers` });
  const box = make("details", { ontoggle: () => update() },
    make("summary", {}, "Numbers"), inside);
  const update = () => {
    if (!box.open) return;
    const cells = ([name, ...numbers]) => [make("th", { scope: "row" }, name),
      ...numbers.map((number, i) => make("td", {}, say(number, i)))];
    inside.replaceChildren(make("table", {},
      make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))),
      ...rows().map((line) => make("tr", {}, ...cells(line)))));
  };
  return { box, update };
}

/** Draw `content` into a frame, and call `update` now and whenever a value changes.
 *
 *  title: of the figure; names: the values that a reader sets; style: its own CSS;
 *  table: what `numbersTable` shows; kept: for answers instead of settings, the name of the
 *  button that takes them back; resize: draws again for another width.
 *  Under the content come a button that sets the values back to what they are now, a
 *  link to the setting where there is a page, and the table; on paper, the setting in
 *  words. Gives what ends it. */
function mount({ model, el }, { title, names, style = "", content, update, table, kept,
  resize }) {
  const initial = Object.fromEntries(names.map((name) => [name, model.get(name)]));
  const reset = make("button", { type: "button", onclick: () => {
    if (model.restore) model.restore(initial);
    else Object.entries(initial).forEach(([name, value]) => model.set(name, value));
    model.save_changes();
  } }, kept ?? "Reset");
  const numbers = table && numbersTable(title, table);
  const tools = make("div", { class: "tools" }, reset, numbers?.box ?? "");
  const caption = make("figcaption");
  const box = make("figure", { class: "box", role: "group", "aria-label": title },
    ...content, ...(names.length ? [tools, caption] : []));
  // A page's element is its own frame.
  const host = el.localName.includes("-") ? el : make("div", { class: "explorable-frame" });
  host.attachShadow({ mode: "open" }).append(make("style", {}, LOOK + style), box);
  // Jupyter's own theme does not tell the browser that it is dark.
  const paint = () => {
    const theme = document.body.dataset.jpThemeLight;
    if (theme) host.style.colorScheme = theme === "false" ? "dark" : "light";
  };
  paint();
  const themed = new MutationObserver(paint);
  themed.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  // JupyterLab would take the arrow keys for its cells.
  host.dataset.lmSuppressShortcuts = true;
  if (host !== el) el.append(host);
  const all = () => {
    update();
    numbers?.update();
    reset.disabled = names.every((name) => model.get(name) === initial[name]);
    const controls = box.querySelectorAll(
      "select, input:is([type=range], [type=checkbox])");
    if (!kept) caption.textContent = `${title}. ${[...controls].map(told).join("; ")}.`;
  };
  const changed = names.map((name) => `change:${name}`).join(" ");
  model.on(changed, all);
  all();
  const sized = resize && new ResizeObserver(() => requestAnimationFrame(resize));
  sized?.observe(box);
  if (kept) model.keep?.(names);
  else reset.after(...model.share?.(initial) ?? []);
  return () => {
    model.off(changed, all);
    themed.disconnect();
    sized?.disconnect();
  };
}

// The module of one explorable follows.
