// The cost calculator: the table follows its two numbers. Without scripts it stays as it was written.
(() => {
  const inputs = document.getElementById("cost-inputs");
  const stepMs = inputs.dataset.stepMs.split(" ").map(Number);
  // Where there is no step to compare with, this is "-".
  const thanMs = inputs.dataset.thanMs.split(" ");
  const [ranks, batch] = [Number(inputs.dataset.ranks), Number(inputs.dataset.batch)];
  const rows = document.querySelector("#cost tbody").querySelectorAll("tr");
  // Three digits, as elsewhere on the page; whole numbers keep all of theirs.
  const text = (value) =>
    value.toLocaleString("en-US", Math.abs(value) < 1000 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
  const [samples, price] = ["cost-samples", "cost-price"].map((id) => document.getElementById(id));
  const show = () => {
    // A field that is empty or out of its range leaves the table as it is.
    if (!samples.value || !price.value || !samples.checkValidity() || !price.checkValidity()) return;
    const steps = Math.ceil(Number(samples.value) / batch);
    document.getElementById("cost-samples-shown").textContent = Number(samples.value).toLocaleString("en-US");
    document.getElementById("cost-price-shown").textContent = price.value;
    rows.forEach((row, at) => {
      const hours = (steps * stepMs[at]) / 3.6e6;
      const devices = hours * ranks;
      const saved = thanMs[at] === "-" ? null : devices - (steps * Number(thanMs[at]) * ranks) / 3.6e6;
      const money = (of) => (of === null ? null : of * Number(price.value));
      const cells = [hours, devices, money(devices), saved, money(saved)];
      cells.forEach((value, column) => (row.children[column + 2].textContent = value === null ? "-" : text(value)));
    });
  };
  inputs.hidden = false;
  inputs.addEventListener("input", show);
})();
