// Three all-reduces, step by step: which rows each rank holds, and whose sums.

const STEPS_OF = { ring: (n) => 2 * n - 2, direct: () => 2, "rank 0": () => 2 };

const STYLE = `
  .line { display: flex; flex-wrap: wrap; gap: 8px 28px; align-items: end; }
  .line label { flex: 0 1 200px; }
  .steps { display: flex; gap: 8px; align-items: center; }
  .wide { overflow-x: auto; margin-top: 10px; }
  table { border-spacing: 3px; font-variant-numeric: tabular-nums; }
  th, td { padding: 3px 4px; text-align: center; min-width: 3.6em; white-space: nowrap; }
  table.many { font-size: 0.8em; }
`;

const mod = (a, n) => ((a % n) + n) % n;

/** After some steps: held[r][j], the ranks whose row j is in rank r's sum, and the
 *  elements that each rank has sent, as a share of the buffer. */
function play(way, n, steps) {
  const all = [...Array(n).keys()];
  const held = all.map((r) => all.map(() => [r]));
  const sent = Array(n).fill(0);
  const gets = {
    ring: (s, r, j, from) => from === mod(r - 1, n) && j === mod(from - s, n),
    direct: (s, r, j, from) => s === 1 ? r === j : from === j,
    "rank 0": (s, r, j, from) => s === 1 ? r === 0 : from === 0,
  }[way];
  for (let s = 1; s <= steps; s++) {
    const before = held.map((row) => [...row]);
    for (const r of all) for (const j of all) for (const from of all) {
      if (!gets(s, r, j, from)) continue;
      if (from !== r) sent[from] += 1 / n;
      const theirs = before[from][j];
      if (way === "ring") held[r][j] = s < n ? [...theirs, r] : theirs;
      else held[r][j] = s === 1 ? all : theirs;
    }
  }
  return { held, sent };
}

const stepOf = (get) => Math.min(get("step"), STEPS_OF[get("way")](get("ranks")));

/** What each rank has sent, as a share of the buffer. */
function numbers(get) {
  const { sent } = play(get("way"), get("ranks"), stepOf(get));
  return sent.map((share, r) => [`rank ${r}`, share]);
}

/** What each rank holds: a line a rank, a column a row of the buffer. */
function drawing(held) {
  const n = held.length;
  const cell = (who) => make("td", {
    class: "paint",
    style: who.length === n ? "background: #0460a9; color: white"
      : `background: rgba(4, 96, 169, ${0.1 + 0.4 * who.length / n})`,
  }, who.join(""));
  return make("table", { class: n > 5 ? "many" : "" },
    make("tr", {}, make("td"), ...held.map((_, j) => make("th", { scope: "col" }, `row ${j}`))),
    ...held.map((row, r) => make("tr", {}, make("th", { scope: "row" }, `rank ${r}`),
      ...row.map(cell))));
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const last = () => STEPS_OF[get("way")](get("ranks"));
  const go = (step) => put(model, "step", Math.max(0, Math.min(last(), step)));
  const restart = (name, value) => {
    put(model, name, value);
    put(model, "step", 0);
  };
  const way = make("select", { onchange: () => restart("way", way.value) },
    ...Object.keys(STEPS_OF).map((name) => make("option", {}, name)));
  const ranks = make("input", { type: "range", min: 2, max: 8, "aria-label": "ranks",
    oninput: () => restart("ranks", ranks.valueAsNumber) });
  const step = make("input", { type: "range", min: 0, "aria-label": "step",
    oninput: () => go(step.valueAsNumber) });
  const button = (text, title, by) => make("button", { type: "button", "aria-label": title,
    onclick: () => go(Math.min(get("step"), last()) + by) }, text);
  const count = make("output");
  const named = (title, control, ...more) => make("label", {},
    make("span", { class: "name" }, title, ...more), control);
  const steps = make("div", {}, make("span", { class: "name" }, "step"),
    make("div", { class: "steps" }, button("◀", "one step back", -1), step,
      button("▶", "one step on", 1)));
  const out = make("div", { class: "wide" });
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    const [n, s] = [get("ranks"), stepOf(get)];
    way.value = get("way");
    ranks.value = n;
    count.textContent = n;
    ranks.setAttribute("aria-valuetext", n);
    step.max = last();
    step.value = s;
    step.setAttribute("aria-valuetext", `${s} of ${last()}`);
    const { held, sent } = play(get("way"), n, s);
    const list = sent.map((x) => +x.toFixed(3));
    const told = list.every((x) => x === list[0]) ? `Each rank has sent ${list[0]} Ψ.`
      : `Ranks 0 to ${n - 1} have sent ${list.join(", ")} Ψ.`;
    out.replaceChildren(drawing(held));
    words.textContent = `Step ${s} of ${last()}. ${told}`;
    words.dataset.sent = JSON.stringify(sent);
  };
  const controls = make("div", { class: "controls line" },
    named("way", way), named("ranks", ranks, count), steps);
  return mount({ model, el }, {
    title: "Three all-reduces",
    names: ["way", "ranks", "step"],
    style: STYLE,
    content: [controls, out, words],
    update,
    table: { head: ["rank", "sent, Ψ"], rows: () => numbers(get), say: short },
  });
}

export default { render, numbers };
