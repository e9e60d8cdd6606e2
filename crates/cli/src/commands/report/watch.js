// Added to the page by `dflop report --watch`: follows the run, and stays at the step that is looked at.
(() => {
  const known = document.currentScript.dataset.state;
  const viewer = document.getElementById("viewer");
  const slider = document.getElementById("viewer-step");
  const kept = JSON.parse(sessionStorage.getItem("dflop-viewer") || "null");
  if (slider) {
    // The newest step, unless another one was looked at. It is named by its number: of a long run not all steps are held.
    slider.value = slider.max;
    slider.dispatchEvent(new Event("input"));
    if (kept && !kept.isLast) viewer.dispatchEvent(new CustomEvent("show-step", { detail: kept }));
  }
  const look = async () => {
    try {
      const answer = await fetch("/state", { cache: "no-store" });
      const state = (await answer.text()).trim();
      if (answer.ok && state !== known.trim() && !document.hidden) {
        const at = viewer && slider
          ? { step: Number(viewer.dataset.step), arm: viewer.dataset.arm, isLast: slider.value === slider.max }
          : null;
        sessionStorage.setItem("dflop-viewer", JSON.stringify(at));
        location.reload();
        return;
      }
    } catch {
      // The server has ended: the page stays as it is.
    }
    setTimeout(look, 2000);
  };
  setTimeout(look, 2000);
})();
