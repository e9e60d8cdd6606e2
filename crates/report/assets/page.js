"use strict";
// Small comforts: one tooltip for all marks, and buttons that hide a layer. The page reads fully without them.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  // The browser would show an SVG title a second time: it moves into a data attribute, but only while pointed at,
  // so that it stays where assistive technology looks for it.
  let held = null;
  const release = () => {
    if (held) held.mark.prepend(held.title);
    held = null;
    tip.hidden = true;
  };
  document.addEventListener("pointerover", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("svg.chart *:has(> title)") : null;
    if (held && held.mark === mark) return;
    release();
    if (!mark) return;
    const title = mark.querySelector(":scope > title");
    held = { mark, title };
    tip.textContent = title.textContent;
    title.remove();
    tip.hidden = false;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") release();
  });
  for (const group of document.querySelectorAll(".toggles")) {
    group.hidden = false;
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const isShown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isShown));
      group.closest("section").classList.toggle(`hide-${button.dataset.hide}`, isShown);
    });
  }
  window.addEventListener("beforeprint", release);
})();
