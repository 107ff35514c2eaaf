// Explorables in a page without a kernel: each is an element that draws itself as soon
// as the page is parsed as far, so that nothing moves later, and keeps its setting in
// the page's address. What stands inside the element is for a page without scripts.

// The reader's model and machine: set in one figure, they are set in all, and kept.
const YOURS = ["n_params", "world_size", "device_memory"];
const KEPT = "minizero: yours";

/** Read or write in this browser's store; a browser may refuse, and all works without. */
function store(place, value) {
  try {
    if (value === undefined) return JSON.parse(localStorage.getItem(place) ?? "{}");
    if (value === null) localStorage.removeItem(place);
    else localStorage.setItem(place, JSON.stringify(value));
  } catch { /* nothing is kept */ }
  return {};
}

/** A model over the state that an element stores. */
class Stored {
  static all = [];

  constructor(element, kind) {
    Stored.all.push(this);
    this.state = JSON.parse(element.dataset.state);
    this.limits = JSON.parse(element.dataset.limits);
    this.listeners = {};
    const before = [...document.querySelectorAll(element.localName)].indexOf(element);
    this.prefix = before ? `${kind}-${before + 1}` : kind;
    element.id = `figure-${this.prefix}`;
  }

  get(name) { return this.state[name]; }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.listeners[`change:${name}`]?.forEach((listener) => listener());
  }

  on(names, listener) {
    for (const name of names.split(" ")) (this.listeners[name] ??= []).push(listener);
  }

  save_changes() {}

  /** A text of the address as a value; undefined if the control cannot have it. */
  read(name, text) {
    const { choices, least, most, whole } = this.limits[name] ?? {};
    if (choices) return choices.find((choice) => String(choice) === text);
    const kind = typeof this.state[name];
    if (kind === "boolean") return { true: true, false: false }[text];
    if (kind !== "number") return text;
    const number = text.trim() ? Number(text) : NaN;
    return number >= (least ?? -Infinity) && number <= (most ?? Infinity)
      && (!whole || Number.isInteger(number)) ? number : undefined;
  }

  /** Keep values in this browser, for the next visit. */
  keep(names) {
    const place = `${location.pathname}#${this.prefix}`;
    const kept = store(place);
    for (const name of names) if (name in kept) this.set(name, kept[name]);
    this.on(names.map((name) => `change:${name}`).join(" "), () =>
      store(place, Object.fromEntries(names.map((n) => [n, this.get(n)]))));
  }

  /** The values that the figure opens with; the reader's model is forgotten. */
  restore(initial) {
    store(KEPT, null);
    this.restoring = true;
    for (const [name, value] of Object.entries(initial)) this.set(name, value);
    this.restoring = false;
  }

  /** Take a value of the reader's model, if the control can have it; of a unit, a block. */
  take(name, value) {
    if (name === "n_params" && value && "unit" in this.state)
      [name, value] = ["unit", Number((value / layersOf(value) / 1e6).toPrecision(2))];
    const own = name in this.state ? this.read(name, String(value)) : undefined;
    if (own !== undefined) this.set(name, own);
  }

  /** Take the setting from the page's address and keep it there; gives a link to it.
   *  The address names the values that differ from the stored ones: `memory.stage=2`. */
  share(initial) {
    const names = Object.keys(initial);
    const asked = new URLSearchParams(location.search);
    const link = make("a", {}, "Link to this setting");
    const yours = make("span");
    const own = YOURS.filter((name) => names.includes(name));
    for (const name of YOURS) this.take(name, store(KEPT)[name]);
    for (const name of own) {
      this.on(`change:${name}`, () => {
        if (this.restoring) return;
        store(KEPT, { ...store(KEPT), [name]: this.state[name] });
        for (const other of Stored.all) if (other !== this) other.take(name, this.state[name]);
      });
    }
    const address = () => {
      const url = new URL(location);
      for (const name of names) {
        url.searchParams.delete(`${this.prefix}.${name}`);
        if (this.state[name] !== initial[name])
          url.searchParams.set(`${this.prefix}.${name}`, this.state[name]);
      }
      return url;
    };
    const point = () => {
      const url = address();
      url.hash = `figure-${this.prefix}`;
      link.href = url;
      yours.textContent = own.some((name) => this.state[name] !== initial[name])
        ? "Your model is kept for all figures; Reset forgets it." : "";
    };
    for (const name of names) {
      const value = this.read(name, asked.get(`${this.prefix}.${name}`) ?? "");
      if (asked.has(`${this.prefix}.${name}`) && value !== undefined) this.set(name, value);
    }
    let waiting;
    this.on(names.map((name) => `change:${name}`).join(" "), () => {
      point();
      clearTimeout(waiting);  // a slider changes faster than a browser lets an address
      waiting = setTimeout(() => history.replaceState(history.state, "", address()), 200);
    });
    point();
    return [link, yours];
  }
}

/** Let a page have elements `explorable-<kind>`. */
function define(kind, { render }) {
  const tag = `explorable-${kind}`;
  if (customElements.get(tag)) return;
  customElements.define(tag, class extends HTMLElement {
    connectedCallback() {
      if (!this.shadowRoot) render({ model: new Stored(this, kind), el: this });
    }
  });
}
