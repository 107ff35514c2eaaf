// Three all-reduces, step by step: ranks on a circle, the rows of the buffer on each, what
// travels between two steps, and how much each link has carried.

const STEPS_OF = { ring: (n) => 2 * n - 2, direct: () => 2, "rank 0": () => 2 };
const TALL = 330;
const TOTAL = { sent: { colour: "#7D7D7D" } };
const PACE = 1100;  // milliseconds of a step that is played

const STYLE = `
  .line { display: flex; flex-wrap: wrap; gap: 8px 28px; align-items: end; }
  .line label { flex: 0 1 180px; }
  .steps { display: flex; gap: 8px; align-items: center; }
  svg { max-width: 620px; margin: 8px auto 0; }
  .link { fill: none; stroke: currentColor; opacity: 0.3; stroke-linecap: round; }
  .cell { stroke: color-mix(in srgb, CanvasText 60%, transparent); }
  .done { stroke: CanvasText; stroke-width: 2.5; }
  .bars { margin-top: 12px; }
  .bars .on { font-weight: 600; }
`;

const mod = (a, n) => ((a % n) + n) % n;

/** After some steps: held[r][j], the ranks whose row j is in rank r's sum; the elements
 *  that each rank has sent and each link carried, as a share of the buffer; and what the
 *  last step sent: [from, to, row, how many ranks' sum]. */
function after(way, n, steps) {
  const all = [...Array(n).keys()];
  const held = all.map((r) => all.map(() => [r]));
  const [sent, links] = [Array(n).fill(0), new Map()];
  let moved = [];
  const gets = {
    ring: (s, r, j, from) => from === mod(r - 1, n) && j === mod(from - s, n),
    direct: (s, r, j, from) => s === 1 ? r === j : from === j,
    "rank 0": (s, r, j, from) => s === 1 ? r === 0 : from === 0,
  }[way];
  for (let s = 1; s <= steps; s++) {
    const before = held.map((row) => [...row]);
    moved = [];
    for (const r of all) for (const j of all) for (const from of all) {
      if (!gets(s, r, j, from)) continue;
      const theirs = before[from][j];
      if (from !== r) {
        sent[from] += 1 / n;
        links.set(`${from} ${r}`, (links.get(`${from} ${r}`) ?? 0) + 1 / n);
        moved.push([from, r, j, theirs.length]);
      }
      if (way === "ring") held[r][j] = s < n ? [...theirs, r] : theirs;
      else held[r][j] = s === 1 ? all : theirs;
    }
  }
  return { held, sent, links, moved };
}

const stepOf = (get) => Math.min(get("step"), STEPS_OF[get("way")](get("ranks")));

/** What each rank has sent, as a share of the buffer. */
function numbers(get) {
  const { sent } = after(get("way"), get("ranks"), stepOf(get));
  return sent.map((share, r) => [`rank ${r}`, share]);
}

/** The ranks on a circle. `part`: how far the last step's messages have come, 0 to 1. */
function drawing({ held, sent, links, moved }, part, way, wide) {
  const n = held.length;
  const side = Math.min(20, 0.2 * wide / n);
  const at = (r) => {
    const angle = 2 * Math.PI * (r / n - 0.25);
    return [wide / 2 + 0.36 * wide * Math.cos(angle), TALL / 2 + 8 + 118 * Math.sin(angle)];
  };
  // A link is bent, so that both directions are seen.
  const bend = (from, to) => {
    const [[a, b], [c, d]] = [at(from), at(to)];
    const far = n === 2 ? 0.35 : 0.14;
    return [[a, b], [(a + c) / 2 + far * (b - d), (b + d) / 2 + far * (c - a)], [c, d]];
  };
  const on = ([p, q, r], t) => [0, 1].map((i) =>
    (1 - t) ** 2 * p[i] + 2 * t * (1 - t) * q[i] + t ** 2 * r[i]);
  const square = (x, y, share, more) => `<rect class="paint cell ${more}" x="${x}" y="${y}"
    width="${side}" height="${side}" fill="#ECAB25" fill-opacity="${share ** 2}"/>`;
  const lines = [...links].map(([key, load]) => {
    const [p, q, r] = bend(...key.split(" ").map(Number));
    const [[x, y], [u, v]] = [on([p, q, r], 0.5), on([p, q, r], 0.55)];
    const angle = Math.atan2(v - y, u - x);
    const turn = 180 / Math.PI * angle;
    const told = links.size > 2 * n ? "" : `<text class="halo bold" x="${x + 30 * Math.sin(angle)}"
      y="${y - 18 * Math.cos(angle) + 4}" text-anchor="middle">${short(load)} Ψ</text>`;
    return `<path class="link" stroke-width="${1 + 8 * load}" d="M${p}Q${q} ${r}"/>
      <path d="M-5 -6L7 0L-5 6Z" transform="translate(${x} ${y}) rotate(${turn})"/>${told}`;
  });
  const ranks = held.map((row, r) => {
    const [x, y] = [at(r)[0] - n * side / 2, at(r)[1] - side / 2];
    const cells = row.map((who, j) => square(x + j * side, y, who.length / n,
      who.length === n ? "done" : ""));
    const broad = Math.max(n * side + 6, 84);  // no link behind the words
    return `<rect x="${at(r)[0] - broad / 2}" y="${y - 22}" width="${broad}" height="${side + 44}"
        fill="Canvas"/>${cells.join("")}
      <text class="halo bold" x="${at(r)[0]}" y="${y - 8}" text-anchor="middle">rank ${r}</text>
      <text class="halo bold" x="${at(r)[0]}" y="${y + side + 16}" text-anchor="middle">sent ${
      short(sent[r])} Ψ</text>`;
  });
  const flying = part >= 1 ? [] : moved.map(([from, to, row, many]) => {
    const [x, y] = on(bend(from, to), part);
    const aside = way === "rank 0" ? (row - (n - 1) / 2) * side : 0;  // all rows travel
    return square(x - side / 2 + aside, y - side / 2, Math.max(0.4, many / n), "done");
  });
  return [...lines, ...ranks, ...flying].join("");
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const last = () => STEPS_OF[get("way")](get("ranks"));
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let [began, waited] = [0, PACE];  // when the last step's messages left; while it plays
  const go = (step) => {
    const next = Math.max(0, Math.min(last(), step));
    began = next === stepOf(get) + 1 && !calm.matches ? performance.now() : 0;
    put(model, "step", next);
    if (began) requestAnimationFrame(fly);
  };
  const restart = (name, value) => {
    play.stop();
    began = 0;
    put(model, name, value);
    put(model, "step", 0);
  };
  const way = choice("way", Object.keys(STEPS_OF).map((name) => [name, name]),
    (name) => restart("way", name));
  const ranks = make("input", { type: "range", min: 2, max: 8, "aria-label": "ranks",
    oninput: () => restart("ranks", ranks.valueAsNumber) });
  const step = make("input", { type: "range", min: 0, "aria-label": "step",
    oninput: () => go(step.valueAsNumber) });
  const button = (text, title, onclick) => make("button", { type: "button",
    "aria-label": title, onclick }, text);
  const play = playing((since) => {
    waited += 1000 * since;
    if (waited < PACE) return true;
    waited = 0;
    go(stepOf(get) < last() ? stepOf(get) + 1 : 0);
    if (stepOf(get) < last()) return true;
    waited = PACE;
    return false;
  });
  const count = make("output");
  const named = (title, control, ...more) => make("label", {},
    make("span", { class: "name" }, title, ...more), control);
  const steps = make("div", {}, make("span", { class: "name" }, "step"),
    make("div", { class: "steps" }, play.button,
      button("◀", "one step back", () => go(stepOf(get) - 1)), step,
      button("▶", "one step on", () => go(stepOf(get) + 1))));
  const [out, svg] = canvas();
  const words = make("p", { class: "words", role: "status" });
  const legend = make("p", { class: "words" }, "A square is a row of the buffer, whose size is " +
    "Ψ: fuller as more ranks are in its sum, framed when all are. A link is as thick as what " +
    "it carried.");
  const ways = Object.keys(STEPS_OF).map((name) => [name, row(TOTAL, (x) => `${short(x)} Ψ`)]);
  const totals = make("div", { class: "bars" }, ...ways.map(([, one]) => one.box));
  const draw = () => {
    const part = began ? Math.min(1, (performance.now() - began) / (0.8 * PACE)) : 1;
    const wide = Math.min(520, out.clientWidth || 520);
    svg.setAttribute("viewBox", `0 0 ${wide} ${TALL}`);
    svg.innerHTML = drawing(after(get("way"), get("ranks"), stepOf(get)), part,
      get("way"), wide);
    return part;
  };
  const fly = () => {
    if (!began || !svg.isConnected) return;
    if (draw() < 1) requestAnimationFrame(fly);
    else began = 0;
  };
  const update = () => {
    const [n, s] = [get("ranks"), stepOf(get)];
    way.show(get("way"));
    ranks.value = n;
    count.textContent = n;
    ranks.setAttribute("aria-valuetext", n);
    step.max = last();
    step.value = s;
    step.setAttribute("aria-valuetext", `${s} of ${last()}`);
    const { sent, links } = after(get("way"), n, s);
    const list = sent.map((x) => +x.toFixed(3));
    const told = list.every((x) => x === list[0]) ? `Each rank has sent ${list[0]} Ψ`
      : `Ranks 0 to ${n - 1} have sent ${list.join(", ")} Ψ`;
    draw();
    const most = ways.map(([name]) => Math.max(...after(name, n, STEPS_OF[name](n)).sent));
    ways.forEach(([name, one], i) => {
      one.update(name, [["sent", most[i]]], Math.max(...most),
        `${short(most[i])} Ψ in ${STEPS_OF[name](n)} steps`);
      one.box.classList.toggle("on", name === get("way"));
    });
    words.textContent = `Step ${s} of ${last()}. ${told}, over ${links.size} links.`;
    svg.setAttribute("aria-label", `Step ${s} of ${last()}. ${told}.`);
  };
  const controls = make("div", { class: "controls line" },
    way.box, named("ranks", ranks, count), steps);
  const end = mount({ model, el }, {
    title: "Three all-reduces",
    names: ["way", "ranks", "step"],
    style: STYLE,
    content: [controls, out, words, legend, make("div", { class: "chart" },
      "The most that one rank sends until all have the sum:", totals)],
    update,
    resize: draw,
    table: { head: ["rank", "sent, Ψ"], rows: () => numbers(get), say: short },
  });
  return () => {
    end();
    play.stop();
  };
}

export default { render, numbers };
