// A weight, an update, and what each floating-point format keeps of their sum: its bits,
// and the numbers that it has on either side of the exact sum.

const POWERS = { ...STEPS, step: 0.25 };
const raised = (k) => [...String(k)].map((c) => "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"["-.0123456789".indexOf(c)]).join("");
const power = (k) => `2${raised(k)} = ${Number((2 ** k).toPrecision(4))}`;
const CONTROLS = {
  weight: ["weight", [-20, 18, POWERS], power],
  update: ["update", [-30, 16, POWERS], power],
};
// Of a row: its width and height, a bit's width, and where bits begin; wide and narrow.
const LAYOUTS = [[600, 78, 13, 78, 0], [330, 96, 9.7, 4, 20]];

const STYLE = `
  .bit { stroke: currentColor; stroke-width: 1; }
  .new { stroke: #2f86c8; stroke-width: 3; }
  .axis { stroke: currentColor; fill: none; }
  .hop { stroke: currentColor; fill: none; stroke-width: 1.5; }
`;

/** The nearest number of the format; of two, the even one. */
function round(x, { digits, lowest, largest }) {
  if (x === 0 || x === Infinity) return x;
  const quantum = spacing(x, { digits, lowest });
  const whole = Math.floor(x / quantum);
  const rest = x / quantum - whole;
  const up = rest > 0.5 || (rest === 0.5 && whole % 2 === 1);
  const near = (whole + up) * quantum;
  return near > largest ? Infinity : near;
}

/** From a number to the next larger one of the format. */
const spacing = (x, { digits, lowest }) =>
  2 ** (Math.max(x ? Math.floor(Math.log2(x)) : lowest, lowest) - digits);

/** The bits of a number: sign, exponent, significand; none of what is too large. */
function bits(x, format) {
  if (x === Infinity) return "";
  const normal = x >= 2 ** format.lowest;
  const power = normal ? Math.floor(Math.log2(x)) : format.lowest;
  const rest = (x / 2 ** power - normal) * 2 ** format.digits;
  const field = normal ? power - format.lowest + 1 : 0;
  return `0${field.toString(2).padStart(format.exponent, 0)}${
    rest.toString(2).padStart(format.digits, 0)}`;
}

function number(x) {
  if (x === Infinity) return "too large";
  return x === 0 ? "0" : String(Number(x.toPrecision(8)));
}

/** The weight as it is stored, and the sum. */
function stored(get, format) {
  const before = round(2 ** get("weight"), format);
  return [before, round(before + 2 ** get("update"), format)];
}

/** The share that each format keeps of the update, and the bits of the sum. */
function numbers(get) {
  return get("formats").map((format) => {
    const [before, after] = stored(get, format);
    return [format.name, (after - before) / 2 ** get("update"), bits(after, format)];
  });
}

const percent = (kept) => kept === 0 ? "lost"
  : Number.isFinite(kept) ? `keeps ${Math.round(100 * kept)} %` : "too large";

/** A format: the bits of the sum, and below them the numbers around the exact one. */
function drawing(get, format, i, [WIDE, ROW, BIT, LEFT, DOWN]) {
  const [head, top, RIGHT] = [i * ROW + 4, i * ROW + 4 + DOWN, LEFT + 32 * BIT];
  const [before, after] = stored(get, format);
  const [old, now] = [before, after].map((x) => bits(x, format));
  const shade = (i) => i > format.exponent ? "#A3A3A3" : i ? "#5A5A5A" : "#797979";
  const boxes = [...now].map((bit, i) => `<rect class="bit paint ${bit === old[i] ? "" : "new"}"
    x="${LEFT + i * BIT + 4 * (i > 0) + 4 * (i > format.exponent)}" y="${top}" width="${BIT - 3}" height="13" rx="2"
    fill="${bit === "1" ? shade(i) : "transparent"}"/>`);
  const update = 2 ** get("update");
  const [exact, step] = [before + update, spacing(before, format)];
  const end = before + 1.25 * Math.max(step, update);
  const x = (value) => LEFT + (RIGHT - LEFT) * Math.min(1, (value - before) / (end - before));
  const y = top + 40;
  const count = Math.min(65, Math.floor((end - before) / step) + 1);
  const ticks = Array.from({ length: count }, (_, i) =>
    `M${x(before + i * step)} ${y - 5}V${y + 5}`);
  // More numbers than can be drawn: a band.
  const many = count > 64 ? `<rect x="${LEFT}" y="${y - 5}" width="${RIGHT - LEFT}" height="10"
    opacity="0.35"/>` : `<path class="axis" d="${ticks.join("")}"/>`;
  const [from, to] = [x(exact), after === Infinity ? RIGHT : x(after)];
  const next = count > 64 ? "" : `<text x="${x(before + step)}" y="${y + 20}"
    text-anchor="${x(before + step) > RIGHT - 90 ? "end" : "middle"}">next: ${number(before + step)}</text>`;
  return `<text class="bold" x="0" y="${head + 11}">${format.name}</text>
    <text class="bold" x="${WIDE}" y="${head + 11}" text-anchor="end">${
    percent((after - before) / update)}</text>${boxes.join("")}
    <path class="axis" d="M${LEFT} ${y}H${RIGHT}"/>${many}
    <text x="${LEFT - 4}" y="${y + 20}">weight: ${number(before)}</text>${
    x(before + step) > LEFT + 200 ? next : ""}
    <path d="M${from} ${y - 3}l-5 -9h10z"/>
    ${Math.abs(to - from) > 12 ? `<path class="hop" d="M${from} ${y - 12}Q${(from + to) / 2} ${y - 26} ${
    to} ${y - 6}"/>` : ""}<circle cx="${to}" cy="${y}" r="5"/>`;
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const formats = get("formats");
  const [box, svg] = canvas();
  box.className = "chart";
  const draw = () => {
    const layout = LAYOUTS[Number((box.clientWidth || 600) < 480)];
    svg.setAttribute("viewBox", `0 0 ${layout[0]} ${layout[1] * formats.length}`);
    svg.innerHTML = formats.map((format, i) =>
      drawing(get, format, i, layout)).join("");
  };
  const update = () => {
    controls.update();
    draw();
    svg.setAttribute("aria-label", numbers(get).map(([name, kept]) =>
      `${name}: ${percent(kept)}`).join(", "));
  };
  const words = make("p", { class: "words" }, "Boxes: the bits of the sum (sign, exponent, " +
    "significand), blue where they are not the weight's. Line: the numbers that the format " +
    "has from the weight on; ▼ is the exact sum, ● what is stored.");
  return mount({ model, el }, {
    title: "A sum in each format",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, box, words],
    update,
    resize: draw,
    table: { head: ["format", "weight", "weight + update", "of the update"],
      rows: () => formats.map((format, i) =>
        [format.name, ...stored(get, format), numbers(get)[i][1]]),
      say: (x, i) => (i < 2 ? number(x) : percent(x)) },
  });
}

export default { render, numbers };
