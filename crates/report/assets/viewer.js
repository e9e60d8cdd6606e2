// The steps one at a time, on a canvas. The data beside it is written by src/page/encode.rs.
(() => {
  const holder = document.getElementById("viewer");
  const source = document.getElementById("viewer-data");
  if (!holder || !source) return;
  const data = JSON.parse(source.textContent);
  const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%()*+,-.;[]^_{|";
  const KINDS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
  const VALUES = new Map([...LETTERS].map((letter, value) => [letter.charCodeAt(0), value]));
  const LISTS = data.lists.map((list) =>
    list.split(" ").filter(Boolean).map((name) => {
      const [stage, microbatch] = name.slice(1).split(".");
      return { kind: name[0], stage: Number(stage), microbatch: Number(microbatch), name: `${stage}${name[0]}${microbatch}` };
    })
  );
  const canvas = document.getElementById("viewer-canvas");
  const slider = document.getElementById("viewer-step");
  const number = document.getElementById("viewer-number");
  const strip = document.getElementById("viewer-strip");
  const reading = document.getElementById("viewer-reading");
  const context = canvas.getContext("2d");
  const LEFT = 118;
  const TOP = 22;
  const GAP = 20;

  /// The spans of a step, rank by rank, in nanoseconds.
  const lanesOf = (step) => {
    const text = step.spans;
    let at = 0;
    const letter = () => VALUES.get(text.charCodeAt(at++));
    const number = () => {
      const first = letter();
      if (first < 56) return first;
      if (first < 79) return 56 + (first - 56) * 80 + letter();
      return (letter() * 80 + letter()) * 80 + letter();
    };
    const unit = step.ns / data.parts;
    return Array.from({ length: data.ranks }, () => {
      let end = 0;
      return LISTS[number()].map((action) => {
        const from = end + number();
        end = from + number();
        return { action, from: from * unit, to: end * unit };
      });
    });
  };

  const ns = (value) => {
    const ms = value / 1e6;
    if (ms < 0.1) return `${Math.round(value).toLocaleString("en")} ns`;
    return `${ms >= 1000 ? Math.round(ms).toLocaleString("en") : ms.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")} ms`;
  };

  const tip = document.querySelector("div.tip");
  let index = 0;
  // Those of the step, then those of the other run's step where there is one: each with its rank, its spans and its step.
  let lanes = [];
  // The whole of a step, however long.
  let shown = { from: 0, to: Infinity };
  let drag = null;
  let colours = {};
  let hatch = null;
  const step = () => data.steps[index];
  // Time that is drawn: the longer of two steps.
  const whole = () => Math.max(1, step().ns, step().other ? step().other.ns : 0);
  const pitch = () => Math.max(3, Math.min(22, Math.floor(900 / Math.max(1, lanes.length))));
  // Pixels above a lane: the other run's lanes stand apart.
  const above = (at) => TOP + at * pitch() + (lanes[at] && lanes[at].run > 0 ? GAP : 0);
  const lanesFor = (of, run) => {
    const ranks = lanesOf(of);
    // A run of fewer ranks has no lanes for those that it lacks.
    let last = ranks.length;
    while (run > 0 && last > 0 && ranks[last - 1].length === 0) last -= 1;
    return ranks.slice(0, last).map((spans, rank) => ({ spans, rank, run, of }));
  };
  const x = (time) => LEFT + ((time - shown.from) / (shown.to - shown.from)) * (canvas.clientWidth - LEFT - 8);
  const time = (pixel) => shown.from + ((pixel - LEFT) / Math.max(1, canvas.clientWidth - LEFT - 8)) * (shown.to - shown.from);

  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["F", "B", "I", "W", "onF", "onB", "idle", "hatch", "tail", "ink", "soft", "grid", "link"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = colours.idle;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = colours.hatch;
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 8);
      pen.lineTo(shift + 8, 0);
    }
    pen.stroke();
    hatch = context.createPattern(tile, "repeat");
  };

  const laneName = ({ rank, of }) => data.lanes[of.lanes][rank];

  const ticks = () => {
    const width = (shown.to - shown.from) / 1e6;
    const raw = width / 8;
    const power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || raw;
    const found = [];
    for (let at = Math.ceil(shown.from / 1e6 / size - 1e-9) * size; at * 1e6 <= shown.to * 1.000001 && found.length < 40; at += size) found.push(at);
    return { found, digits: Math.max(0, Math.min(6, Math.ceil(-Math.log10(size)))) };
  };

  const draw = () => {
    const height = above(lanes.length - 1) + pitch() + 4;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * scale);
    canvas.height = Math.round(height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, height);
    const right = canvas.clientWidth - 8;
    const lane = pitch() - (pitch() > 8 ? 3 : 1);
    const font = getComputedStyle(document.body).fontFamily;
    context.font = `12px ${font}`;
    context.textBaseline = "middle";
    const { found, digits } = ticks();
    context.textAlign = "center";
    for (const at of found) {
      context.fillStyle = colours.grid;
      context.fillRect(x(at * 1e6), TOP - 4, 1, height - TOP);
      context.fillStyle = colours.soft;
      context.fillText(at.toFixed(digits), Math.min(x(at * 1e6), right - 12), 8);
    }
    context.textAlign = "left";
    context.fillStyle = colours.soft;
    context.fillText("ms", 0, 8);
    lanes.forEach((shownLane, at) => {
      const { spans, rank, run, of } = shownLane;
      const tail = of.ns - of.tail;
      const y = above(at);
      if (run > 0 && rank === 0) {
        context.fillStyle = colours.soft;
        context.fillText(`${data.names[1]}, ${of.arm}`, 0, y - GAP / 2 - 1);
      }
      if (pitch() >= 11 || rank % Math.ceil(11 / pitch()) === 0) {
        context.fillStyle = colours.ink;
        context.fillText(laneName(shownLane), 0, y + lane / 2);
      }
      context.save();
      context.beginPath();
      context.rect(LEFT, y, right - LEFT, lane);
      context.clip();
      const block = (from, to, fill) => {
        context.fillStyle = fill;
        const left = x(from);
        const width = Math.max(0.5, x(to) - left);
        context.fillRect(left, y, width > 3 ? width - 0.6 : width, lane);
      };
      block(0, tail, hatch);
      if (of.tail > 0) block(tail, of.ns, colours.tail);
      context.font = `${Math.min(10.5, lane - 1)}px ${font}`;
      context.textAlign = "center";
      for (const span of spans) {
        if (span.to < shown.from || span.from > shown.to) continue;
        block(span.from, span.to, colours[span.action.kind]);
        const label = String(span.action.microbatch);
        if (lane >= 10 && x(span.to) - x(span.from) > label.length * 6.4 + 4) {
          context.fillStyle = span.action.kind === "F" ? colours.onF : colours.onB;
          context.fillText(label, (x(span.from) + x(span.to)) / 2, y + lane / 2 + 0.5);
        }
      }
      context.restore();
    });
    if (drag && Math.abs(drag.to - drag.from) > 3) {
      context.fillStyle = colours.link;
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(drag.from, drag.to), TOP, Math.abs(drag.to - drag.from), height - TOP);
      context.globalAlpha = 1;
    }
    holder.dataset.step = step().step;
    holder.dataset.arm = step().arm;
    holder.dataset.from = Math.round(shown.from);
    holder.dataset.to = Math.round(shown.to);
  };

  /// The time of every step as a bar: which were slow is seen before any is looked at.
  const longest = data.steps.reduce((most, one) => Math.max(most, one.ns), 1);
  const drawStrip = () => {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [strip.clientWidth, strip.clientHeight];
    strip.width = Math.round(width * scale);
    strip.height = Math.round(height * scale);
    const pen = strip.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const each = width / data.steps.length;
    const bar = (at, colour, least) => {
      const tall = Math.max(1, (height - 2) * (data.steps[at].ns / longest));
      pen.fillStyle = colour;
      pen.fillRect(at * each, height - tall, Math.max(least, each > 3 ? each - 1 : each), tall);
    };
    data.steps.forEach((_, at) => bar(at, colours.F, 1));
    bar(index, colours.link, 2.5);
  };
  const stepAt = (event) => {
    const box = strip.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / Math.max(1, box.width)) * data.steps.length);
    return Math.max(0, Math.min(data.steps.length - 1, at));
  };

  /// Shows the whole step, or a part of it that lies within.
  const window_ = (from, to) => {
    const width = Math.max(whole() / 2000, Math.min(whole(), to - from));
    const start = Math.max(0, Math.min(whole() - width, from));
    shown = { from: start, to: start + width };
    draw();
  };
  const zoom = (factor, middle = (shown.from + shown.to) / 2) => {
    const width = (shown.to - shown.from) * factor;
    const share = (middle - shown.from) / (shown.to - shown.from);
    window_(middle - share * width, middle + (1 - share) * width);
  };
  const show = (next) => {
    const isWhole = shown.from === 0 && shown.to >= whole();
    index = Math.max(0, Math.min(data.steps.length - 1, next));
    slider.value = String(index);
    number.value = String(step().step);
    const { other } = step();
    lanes = other ? [...lanesFor(step(), 0), ...lanesFor(other, 1)] : lanesFor(step(), 0);
    const told = ({ arm, how, ns: took, predicted, idle }) =>
      `${arm}, ${how}: ${ns(took)}, idle ${idle}${predicted > 0 ? `; ${ns(predicted)} predicted` : ""}`;
    const name = step().step.toLocaleString("en");
    reading.textContent = other
      ? `Step ${name}, ${data.names[0]}, ${told(step())}. Below it ${data.names[1]}, ${told(other)}`
      : `Step ${name}, ${told(step())}`;
    slider.setAttribute("aria-valuetext", reading.textContent);
    canvas.setAttribute("aria-label", `Timeline of ${reading.textContent}. The table below has all steps.`);
    if (isWhole) window_(0, whole());
    else window_(shown.from, shown.to);
    drawStrip();
  };
  const slowest = () => data.steps.reduce((best, one, at) => (one.ns > data.steps[best].ns ? at : best), 0);
  const acts = {
    before: () => show(index - 1),
    after: () => show(index + 1),
    slowest: () => show(slowest()),
    in: () => zoom(0.5),
    out: () => zoom(2),
    all: () => window_(0, whole()),
  };
  holder.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-do]");
    if (button) acts[button.dataset.do]();
  });
  slider.addEventListener("input", () => show(Number(slider.value)));
  // The step of a number; of several arms that of its arm. Where the page does not hold it, the next one that it holds.
  const find = (number, arm) => {
    const same = data.steps.findIndex((one) => one.step === number && one.arm === arm);
    const next = same >= 0 ? same : data.steps.findIndex((one) => one.step >= number);
    show(next < 0 ? data.steps.length - 1 : next);
  };
  number.addEventListener("change", () => find(Number(number.value), step().arm));
  holder.addEventListener("show-step", (event) => find(event.detail.step, event.detail.arm));
  // Links elsewhere on the page that name a step.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-step]");
    if (link) find(Number(link.dataset.step), link.dataset.arm);
  });
  strip.addEventListener("pointerdown", (event) => {
    strip.setPointerCapture(event.pointerId);
    show(stepAt(event));
  });
  strip.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) show(stepAt(event));
    const one = data.steps[stepAt(event)];
    tip.textContent = `step ${one.step.toLocaleString("en")}, ${one.arm}: ${ns(one.ns)}`;
    tip.hidden = false;
  });
  strip.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const move = (part) => window_(shown.from + part * (shown.to - shown.from), shown.to + part * (shown.to - shown.from));
    const keys = {
      "+": acts.in, "=": acts.in, "-": acts.out, 0: acts.all, Home: acts.all, PageUp: acts.before, PageDown: acts.after,
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  const said = (pixel, y) => {
    const lane = lanes.find((_, index) => y >= above(index) && y < above(index) + pitch());
    const at = time(pixel);
    if (pixel < LEFT || !lane || at < 0 || at > lane.of.ns) return "";
    const { spans, of } = lane;
    const next = spans.findIndex((span) => span.to >= at);
    const name = of === step() ? laneName(lane) : `${data.names[1]}, ${laneName(lane)}`;
    if (next >= 0 && spans[next].from <= at) {
      const { action, from, to } = spans[next];
      return `${name}: ${action.name}, ${KINDS[action.kind]} of microbatch ${action.microbatch}: ${ns(to - from)}, from ${ns(from)}`;
    }
    const tail = of.ns - of.tail;
    if (at >= tail) return `reduction and optimizer: ${ns(of.tail)}`;
    const from = next > 0 ? spans[next - 1].to : next === 0 || spans.length === 0 ? 0 : spans[spans.length - 1].to;
    const to = next >= 0 ? spans[next].from : tail;
    return `${name} waits ${ns(to - from)}, from ${ns(from)}${next >= 0 ? `, for ${spans[next].action.name}` : ""}`;
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [pixel, y] = place(event);
    if (drag) {
      drag.to = Math.max(LEFT, Math.min(canvas.clientWidth - 8, pixel));
      draw();
    }
    const text = drag ? "" : said(pixel, y);
    tip.textContent = text;
    tip.hidden = !text;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerdown", (event) => {
    const [pixel] = place(event);
    if (event.button !== 0 || event.pointerType === "touch" || pixel < LEFT) return;
    drag = { from: pixel, to: pixel };
    canvas.setPointerCapture(event.pointerId);
  });
  const release = () => {
    if (!drag) return;
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    drag = null;
    if (to - from > 3) window_(time(from), time(to));
    else draw();
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("dblclick", acts.all);
  canvas.addEventListener("wheel", (event) => {
    // A wheel alone scrolls the page, as anywhere else.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, time(place(event)[0]));
  }, { passive: false });

  const restyle = () => { readColours(); draw(); drawStrip(); };
  holder.hidden = false;
  readColours();
  show(0);
  window.addEventListener("resize", () => { draw(); drawStrip(); });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", restyle);
})();
