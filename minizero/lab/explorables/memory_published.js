// Published peaks beside the estimate: what they have more on fewer GPUs is model state.

// What the published runs kept: 4 bytes for each of parameter, gradient and Adam's states.
const KEPT = { precision: "fp32", optimizer: "adam", offload_optimizer: false,
  offload_param: false, stage: 3 };

/** The published runs with this setting. */
function publishedAt(get) {
  return Object.entries(KEPT).some(([name, value]) => get(name) !== value) ? []
    : get("published").filter(({ n_params, few, many }) =>
      n_params === get("n_params") && [few, many].includes(get("world_size")));
}

/** Bytes that a GPU has more on few GPUs: [run, few, many, published, estimated]. */
function differences(get, runs) {
  return runs.map(({ run, n_params, few, many, peaks }) => {
    const split = STATES.reduce((sum, name) => sum + coefficients(get, 3)[name][1], 0);
    return [run, few, many, peaks[0] - peaks[1], n_params * split * (1 / few - 1 / many)];
  });
}

/** Buttons for the published numbers of GPUs, and what was published there. */
function publishedRuns(model) {
  const get = (name) => model.get(name);
  const n = get("published")[0].n_params;
  const counts = [...new Set(get("published").flatMap(({ few, many }) => [few, many]))]
    .sort((a, b) => a - b);
  const buttons = counts.map((count) => make("button", { type: "button", onclick: () => {
    const setting = { n_params: n, world_size: count, ...KEPT };
    Object.entries(setting).forEach(([name, value]) => model.set(name, value));
    model.save_changes();
  } }, gpus(count)));
  const box = make("div", { role: "group", "aria-label": "Published runs" },
    make("span", { class: "name" }, "As published, Llama 8B on"),
    make("div", { class: "presets" }, ...buttons));
  const note = make("div", { class: "numbers published", role: "region", tabindex: 0,
    "aria-label": "Published peaks" });
  const update = () => {
    const runs = publishedAt(get);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed",
      String(runs.length > 0 && counts[i] === get("world_size"))));
    note.hidden = !runs.length;
    if (note.hidden) return;
    const head = (text) => make("th", { scope: "col" }, text);
    const { few, many } = runs[0];
    note.replaceChildren(make("p", {},
      "Published peaks of a GPU, activations included. They differ by model state alone."),
    make("table", {},
      make("tr", {}, ...["run", gpus(few), gpus(many), "difference", "estimated", "error"]
        .map(head)),
      ...differences(get, runs).map(([run, , , found, told], i) => make("tr", {},
        make("th", { scope: "row" }, run), ...[...runs[i].peaks, found, told].map((bytes) =>
          make("td", {}, amount(bytes))),
        make("td", {}, `${(100 * (told / found - 1)).toFixed(1)} %`)))));
  };
  return { box, note, update };
}
