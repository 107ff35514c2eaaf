// The switch of a page that hides all code; the browser remembers it.
function toggleCode() {
  const hide = document.documentElement.dataset.code !== "hidden";
  try { localStorage.code = hide ? "hidden" : "shown"; } catch {} // a file of no origin
  showCode(hide);
}

function showCode(hide) {
  document.documentElement.dataset.code = hide ? "hidden" : "shown";
  document.querySelector(".btn-code-button")?.setAttribute("aria-pressed", hide);
}

let hidden = false;
try { hidden = localStorage.code === "hidden"; } catch {}
showCode(hidden); // in the head: nothing moves when the page is drawn
addEventListener("DOMContentLoaded", () => showCode(hidden));
