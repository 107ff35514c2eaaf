// A question whose answer is a line: the reader draws it, by pointer or point by point.

const [WIDE, HIGH] = [400, 150];

/** An element of a drawing. */
function shape(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** What takes a line: a slider a point for keyboards, and a drawing for pointers. */
function curveField(question, palette) {
  const { xs, answer } = question;
  const say = withUnit(question);
  // A round limit: it says little of the answer.
  const power = 10 ** Math.floor(Math.log10(1.5 * Math.max(...answer)));
  const most = power * [1, 2, 5, 10].find((k) => k * power >= 1.5 * Math.max(...answer));
  const at = (i) => WIDE * (i + 0.5) / xs.length;
  const points = (ys) => ys.map((y, i) => `${at(i)},${HIGH * (1 - y / most)}`).join(" ");
  const path = (stroke, dash) => shape("polyline", { fill: "none", stroke,
    "stroke-width": 3, "stroke-dasharray": dash, "stroke-linejoin": "round" });
  const drawn = path(palette["you said"].colour, "none");
  const right = path("currentColor", "7 4");
  const handles = xs.map((_, i) => shape("circle", { r: 6, cx: at(i),
    fill: palette["you said"].colour, stroke: "currentColor" }));
  const focus = shape("circle", { r: 8, fill: "none", stroke: "currentColor",
    "stroke-width": 2, visibility: "hidden" });
  const svg = shape("svg", { viewBox: `-40 -12 ${WIDE + 50} ${HIGH + 40}`,
    role: "img", "aria-label": question.ask });
  svg.append(shape("rect", { x: 0, y: 0, width: WIDE, height: HIGH, fill: "transparent",
    stroke: "currentColor", "stroke-opacity": 0.5 }),
    ...[0, most / 2, most].map((y) => shape("text", { x: -6,
      y: HIGH * (1 - y / most) + 4, "text-anchor": "end" }, short(y))),
    ...xs.map((x, i) => shape("text", { x: at(i), y: HIGH + 18,
      "text-anchor": "middle" }, x)),
    shape("text", { x: 6, y: 14 }, question.unit), drawn, right, ...handles, focus);
  let touched = false;
  const inputs = xs.map((x) => make("input", { type: "range", min: 0, max: most,
    step: most / 60, value: most / 2, "aria-label": `${question.ask} ${x}`,
    oninput: () => {
      touched = true;
      redraw();
    },
    onfocus: () => redraw(),
    onblur: () => focus.setAttribute("visibility", "hidden") }));
  const line = () => inputs.map((input) => input.valueAsNumber);
  const redraw = () => {
    drawn.setAttribute("points", points(line()));
    inputs.forEach((input, i) => {
      input.setAttribute("aria-valuetext", say(input.valueAsNumber));
      handles[i].setAttribute("cy", HIGH * (1 - input.valueAsNumber / most));
      if (!input.matches(":focus-visible")) return;
      focus.setAttribute("cx", at(i));
      focus.setAttribute("cy", HIGH * (1 - input.valueAsNumber / most));
      focus.setAttribute("visibility", "visible");
    });
  };
  const follow = (event) => {
    const place = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(svg.getScreenCTM().inverse());
    const i = Math.floor(xs.length * place.x / WIDE);
    if (!inputs[i]) return;
    inputs[i].value = most * (1 - place.y / HIGH);
    touched = true;
    redraw();
  };
  drag(svg, follow);
  const show = (guess) => {
    if (guess) inputs.forEach((input, i) => { input.value = guess[i]; });
    redraw();
    right.setAttribute("points", guess ? points(answer) : "");
    if (!guess) return "";
    const wrong = guess.reduce((sum, y, i) => sum + Math.abs(y - answer[i]), 0);
    const share = wrong / answer.reduce((a, b) => a + b);
    return `Your line is ${short(100 * share)} % off in the mean; the dashed one is right.`;
  };
  const sliders = make("div", { class: "points" }, ...inputs);
  return { line: [svg, sliders], below: "", field: inputs[0], show,
    value: () => touched ? line() : undefined,
    wanted: "Draw a line first: with the pointer, or with the arrow keys." };
}
