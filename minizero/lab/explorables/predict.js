// Questions that take the reader's answer before they show theirs.

const STYLE = `
  form { padding: 10px 0; display: grid; gap: 6px; }
  form + form { border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
  .line { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; }
  input[type="text"] { width: 7em; }
  .bars { max-width: 34em; }
  p { margin: 0; }
  .told:empty, .bars:empty { display: none; }
  svg { max-width: 34em; touch-action: none; cursor: crosshair; font-size: 12px; }
  @container (max-width: 400px) { svg { font-size: 17px; } }  /* of 450 units */
  .points { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  @media print { .line:has(svg) { display: block !important; } }
`;

/** "1,000", "1.5e9" or "1,5" as a number; NaN for anything else. */
function parse(text) {
  const bare = text.replace(/[\s_]/g, "");
  const whole = /^-?\d{1,3}(,\d{3})+(\.\d+)?$/.test(bare);
  return bare ? Number(bare.replaceAll(",", whole ? "" : ".")) : NaN;
}

/** How far a guess is off, in words. */
function off(guess, answer) {
  if (Math.abs(guess - answer) <= 0.005 * Math.abs(answer)) return "You are right.";
  const side = guess > answer ? "too high" : "too low";
  const ratio = guess / answer;
  if (!(ratio > 0 && ratio < Infinity))
    return `You are ${short(Math.abs(guess - answer))} ${side}.`;
  const factor = Math.max(ratio, 1 / ratio);
  return factor < 2 ? `You are ${short(100 * Math.abs(ratio - 1))} % ${side}.`
    : `You are a factor of ${short(factor)} ${side}.`;
}

const withUnit = ({ unit }) => (x) =>
  [typeof x === "number" ? short(x) : x, unit].filter(Boolean).join(" ");

/** What takes a number: [element, what is in it now, show what was answered]. */
function numberField(question, palette) {
  const say = withUnit(question);
  const field = make("input", { type: "text", inputmode: "decimal", autocomplete: "off",
    "aria-label": question.ask });
  const rows = Object.keys(palette).map(() => row(palette, say));
  const bars = make("div", { class: "bars" });
  const show = (guess) => {
    field.value = guess ?? "";
    bars.replaceChildren(...(guess === undefined ? [] : rows.map((one) => one.box)));
    if (guess === undefined) return "";
    const both = [guess, question.answer];
    Object.keys(palette).forEach((name, i) => rows[i].update(
      name, [[name, both[i]]], Math.max(...both), say(both[i])));
    return off(guess, question.answer);
  };
  const value = () => {
    const guess = parse(field.value);
    return Number.isFinite(guess) ? guess : undefined;
  };
  return { line: [field, question.unit], below: bars, value, show, field,
    wanted: "Write a number, such as 1.5." };
}

/** What takes one of some choices. */
function choiceField(question) {
  const field = make("select", { "aria-label": question.ask },
    make("option", { value: "" }, "choose"),
    ...question.choices.map((text) => make("option", {}, text)));
  const show = (guess) => {
    field.value = guess ?? "";
    if (guess === undefined) return "";
    return guess === question.answer ? "You are right." : "That is not it.";
  };
  return { line: [field], below: "", value: () => field.value || undefined, show, field,
    wanted: "Choose an answer." };
}

/** Where the page gives the answer, what the reader predicted. */
function mark(question, words) {
  const there = document.getElementById(question.at);
  if (!there) return;
  const place = there.querySelector("h2, h3, h4") ?? there;
  let note = [...there.querySelectorAll("[data-mark]")].find((one) =>
    one.dataset.mark === question.ask);
  if (!note) {
    note = make("p", { "data-mark": question.ask,
      style: "border-left: 3px solid #2f86c8; padding-left: 10px" });
    place.after(note);
  }
  note.textContent = words;
  note.hidden = !words;
}

/** A question with what takes its answer, and what then stands below. */
function item(model, question) {
  const kind = question.xs ? curveField : question.choices ? choiceField : numberField;
  const part = kind(question, model.get("palette"));
  const told = make("p", { class: "told", role: "status" });
  const check = make("button", {}, "Check");
  const answer = (event) => {
    event.preventDefault();
    const guess = part.value();
    part.field.setAttribute("aria-invalid", String(guess === undefined));
    if (guess === undefined) told.textContent = part.wanted;
    else put(model, "answers", { ...model.get("answers"), [question.ask]: guess });
  };
  const box = make("form", { onsubmit: answer }, make("p", {}, question.ask),
    make("div", { class: "line" }, ...part.line, check), part.below, told);
  let shown = null;
  const update = () => {
    const guess = model.get("answers")[question.ask];
    if (guess === shown) return;  // what is being written stays
    shown = guess;
    const judged = part.show(guess);
    told.textContent = judged && `${judged} ${inWords(question)}`;
    marked();
  };
  const marked = () => {
    const said = shown && (Array.isArray(shown) ? "a line" : withUnit(question)(shown));
    if (question.at) mark(question, said ? `You predicted ${said}. ${told.textContent}` : "");
  };
  return { box, update, mark: marked };
}

/** The answer in words. */
function inWords(question) {
  const { answer, why } = question;
  const shown = Array.isArray(answer)
    ? answer.map((y, i) => `${question.xs[i]}: ${short(y)}`).join(", ")
    : typeof answer === "string" ? answer : short(answer);
  return `The answer: ${[shown, question.unit].filter(Boolean).join(" ")}. ${why}`.trim();
}

function render({ model, el }) {
  const items = model.get("questions").map((question) => item(model, question));
  // What follows in the page is there only later.
  document.addEventListener("DOMContentLoaded", () => items.forEach((one) => one.mark()));
  return mount({ model, el }, {
    title: "Predict first",
    names: ["answers"],
    style: STYLE,
    content: items.map(({ box }) => box),
    update: () => items.forEach(({ update }) => update()),
    kept: "Forget my answers",
  });
}

export default { render };
