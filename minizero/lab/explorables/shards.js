// A small flat buffer, cut into a shard a rank and into buckets.

const CONTROLS = {
  ranks: ["ranks", [1, 8, STEPS], String],
  bucket: ["bucket size", [1, 32, STEPS], (n) => `${n} elements`],
};

const STYLE = `
  .shards { margin: 0.6em 0; overflow-x: auto; display: flex; gap: 6px; }
  .shards > div { white-space: nowrap; flex: none; border: 2px solid currentColor;
    border-radius: 6px; padding: 3px; }
  .shards > .of { border-color: transparent; padding-left: 0; }
  .shards div div { line-height: 32px; }
  .cell { display: inline-block; line-height: 28px; text-align: center;
    width: clamp(24px, (100cqi - 100px) / var(--columns) - 12px, 64px);
    margin: 1px; border: 1px solid #797979; }
  .shards .head { text-align: center; font-weight: 600; line-height: 22px; }
  .cell.padding { border-style: dashed; }
  @container (max-width: 400px) { .shards .head { font-size: 11px; } }
`;

/** How n elements lie in shards, and what reducing them in buckets sends. */
function layout(elements, ranks, bucket) {
  const size = Math.ceil(elements / ranks);
  const width = Math.max(1, Math.floor(bucket / ranks));
  const padded = ranks * size;
  return {
    size, width, padded,
    calls: Math.ceil(size / width),
    most: Math.min(width, size) * ranks,
    sent: 2 * padded * (ranks - 1) / ranks,
  };
}

/** How the buffer lies, and what reducing it sends. */
function numbers(get) {
  const elements = Object.values(get("sizes")).reduce((a, b) => a + b, 0);
  const { padded, calls, most, sent } = layout(elements, get("ranks"), get("bucket"));
  return [["elements with padding", padded], ["all-reduces", calls],
    ["elements of the largest", most], ["elements a rank sends", sent]];
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const sizes = Object.entries(get("sizes"));
  const names = sizes.flatMap(([name, count]) => Array(count).fill(name));
  const table = make("div", { class: "shards", role: "img" });
  const words = make("p", { class: "words", role: "status" });
  const cell = (i) => {
    const look = get("palette")[names[i]];
    const style = look ? `background: ${fill(look)}; color: ${look.ink}` : "";
    const kind = `cell paint${look ? "" : " padding"}`;
    return make("span", { class: kind, style, title: names[i] ?? "padding" }, String(i));
  };
  const update = () => {
    controls.update();
    const [n, bucket] = [get("ranks"), get("bucket")];
    const { size, width, padded, calls, most, sent } = layout(names.length, n, bucket);
    const rows = (row) => Array.from({ length: n }, (_, r) => make("div", {}, ...row(r)));
    // A bucket is the same columns of every rank: one call sums them, shard by shard.
    const buckets = Array.from({ length: calls }, (_, b) => {
      const columns = Array.from({ length: Math.min(width, size - b * width) },
        (_, c) => b * width + c);
      const name = columns.length > 1 ? `bucket ${b}` : b;
      return make("div", { title: `bucket ${b}` }, make("div", { class: "head" }, name),
        ...rows((r) => columns.map((c) => cell(r * size + c))));
    });
    table.style.setProperty("--columns", size);
    table.replaceChildren(make("div", { class: "of" }, make("div", { class: "head" }, "\u00a0"),
      ...rows((r) => [`rank ${r}`])), ...buckets);
    words.textContent = `${calls} all-reduce${calls > 1 ? "s" : ""} of ${most} elements at most. ` +
      `The buffer has ${names.length} elements and ${padded - names.length} of padding; however ` +
      `large its buckets are, each rank sends 2 · ${padded} · ${n - 1}/${n} = ${short(sent)}. A bucket is a piece of ` +
      "every rank's shard, so that each rank has its part of the sums after every call.";
    words.dataset.layout = JSON.stringify({ padded, calls, most, sent });
    table.setAttribute("aria-label", words.textContent);
  };
  const all = Object.fromEntries(sizes.map(([name, count]) =>
    [`${name} ${count}`, get("palette")[name]]));
  const chart = make("div", { class: "chart" }, key(all), table, words);
  return mount({ model, el }, {
    title: "Shards and buckets",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, chart],
    update,
    table: { head: ["what", "how many"], rows: () => numbers(get), say: short },
  });
}

export default { render, numbers };
