// A small flat buffer, cut into a shard a rank and into buckets.

const CONTROLS = {
  ranks: ["ranks", [1, 8, STEPS], String],
  bucket: ["bucket size", [1, 32, STEPS], (n) => `${n} elements`],
};

const STYLE = `
  .shards { margin: 0.6em 0; overflow-x: auto; font-size: 15px; }
  .shards div { white-space: nowrap; }
  .shards div > span { display: inline-block; }
  .shards .of { width: 4em; }
  .cell { width: 30px; line-height: 26px; text-align: center; font-size: 13px; margin: 1px;
    border: 1px solid #797979; }
  .last { margin-right: 14px !important; }
  .head { text-align: center; font-size: 12.5px; font-weight: 600; margin: 0 1px 2px;
    border-bottom: 2px solid currentColor; }
  .cell.padding { border-style: dashed; }
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
  const cell = (i, last) => {
    const look = get("palette")[names[i]];
    const style = look ? `background: ${fill(look)}; color: ${look.ink}` : "";
    const kind = `cell paint${last ? " last" : ""}${look ? "" : " padding"}`;
    return make("span", { class: kind, style, title: names[i] ?? "padding" }, String(i));
  };
  const update = () => {
    controls.update();
    const [n, bucket] = [get("ranks"), get("bucket")];
    const { size, width, padded, calls, most, sent } = layout(names.length, n, bucket);
    const heads = Array.from({ length: calls }, (_, b) => {
      const columns = Math.min(width, size - b * width);
      return make("span", { class: "head last", style: `width: ${32 * columns - 2}px`,
        title: `bucket ${b}` }, columns > 1 ? `bucket ${b}` : b);
    });
    table.replaceChildren(make("div", {}, make("span", { class: "of" }), ...heads),
      ...Array.from({ length: n }, (_, r) => make("div", {},
      make("span", { class: "of" }, `rank ${r}`),
      ...Array.from({ length: size }, (_, c) =>
        cell(r * size + c, c % width === width - 1)))));
    words.textContent = `${n} ${n > 1 ? "ranks" : "rank"}, buckets of ${bucket} elements: ` +
      `${names.length} elements and ${padded - names.length} of padding, ` +
      `${calls} all-reduce${calls > 1 ? "s" : ""} of ${most} elements at most; ` +
      `each rank sends 2 · ${padded} · ${n - 1}/${n} = ${short(sent)}.`;
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
