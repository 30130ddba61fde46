// The profile over offsets, two heads side by side, and what starts the page.
const SVG = "http://www.w3.org/2000/svg";
const sides = ["left", "right"];
const bothViewer = new Viewer(byId("both-picture"), byId("comparison-readout"), "Both masks; the arrow keys move the cross");

function drawn(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
}

function chosenHeads() {
  const mask = shown();
  const layer = byId("profile-layer").selectedIndex - 1;
  const head = byId("profile-head").selectedIndex - 1;
  return mask.heads.flatMap((heads, at) => heads.filter((_, place) => (layer < 0 || at === layer) && (head < 0 || place === head)));
}

function drawProfile() {
  const mask = shown();
  const profiles = chosenHeads().map((which) => mask.profileOf(which));
  const step = mask.profile_step;
  const points = profiles[0].map((_, index) => {
    const values = profiles.map((profile) => profile[index]);
    return { offset: index * step, mean: values.reduce((sum, value) => sum + value, 0) / values.length };
  });
  const width = Math.min(Math.max(byId("profile").clientWidth, 300), 900), height = 260;
  const left = 56, right = 12, top = 12, bottom = 46;
  const end = points.length * step;
  const across = (offset) => left + (Math.log2(1 + offset) / Math.log2(1 + end)) * (width - left - right);
  const up = (share) => top + (1 - share) * (height - top - bottom);
  const label = `Share of entries kept by offset, ${profiles.length === 1 ? "one head" : `mean over ${profiles.length} heads`}. The values are in the table below.`;
  const chart = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart wide", role: "img", "aria-label": label });
  chart.setAttribute("width", width);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(drawn("path", { class: "line", d: `M${left} ${up(share)}H${width - right}` }));
    chart.append(drawn("text", { x: left - 8, y: up(share), dy: ".35em", "text-anchor": "end" }, `${100 * share} %`));
  }
  let free = 0;
  for (let offset = 0; offset < end; offset = offset ? 2 * offset : 1) {
    const at = across(offset);
    chart.append(drawn("path", { class: "line", d: `M${at} ${up(0)}v5` }));
    if (at < free) continue;
    chart.append(drawn("text", { x: at, y: up(0) + 20, "text-anchor": "middle" }, offset));
    free = at + 28;
  }
  const steps = points.map(({ offset, mean }) => `H${across(offset).toFixed(1)}V${up(mean).toFixed(1)}`).join("");
  chart.append(drawn("path", { class: "area", d: `M${left} ${up(0)}${steps}H${across(end)}V${up(0)}Z` }));
  chart.append(drawn("path", { class: "curve", d: `M${left} ${up(points[0].mean)}${steps}H${across(end)}` }));
  const title = width < 500 ? "offset, in tokens (logarithmic)" : "offset between query and key, in tokens (logarithmic)";
  chart.append(drawn("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, title));
  byId("profile").replaceChildren(chart);
  fillProfileTable(points, step);
}

function fillProfileTable(points, step) {
  const rows = [];
  for (let first = 0; first < points.length * step; first = first ? 2 * first : 1) {
    const last = Math.min(Math.max(2 * first - 1, 0), points.length * step - 1);
    const within = points.filter(({ offset }) => offset + step > first && offset <= last);
    const mean = within.reduce((sum, point) => sum + point.mean, 0) / within.length;
    rows.push(element("tr", {}, element("th", { scope: "row" }, first === last ? `${first}` : `${first} to ${last}`), element("td", {}, percent(mean))));
  }
  const heading = element("tr", {}, element("th", { scope: "col" }, "offset"), element("th", { scope: "col" }, "kept"));
  const caption = element("caption", {}, "Mean share of entries kept by offset");
  byId("profile-table").replaceChildren(element("table", {}, caption, element("thead", {}, heading), element("tbody", {}, ...rows)));
}

function fillLayersAndHeads(mask, layers, heads, all) {
  const names = mask.heads.map((_, layer) => mask.layerName(layer));
  choices(layers, all && mask.heads.length > 1 ? ["all", ...names] : names);
  choices(heads, [...(all ? ["mean over heads"] : []), ...mask.heads[0].map((_, head) => `Head ${head}`)]);
}

function sideOf(side) {
  const mask = masks[byId(`${side}-mask`).selectedIndex];
  const place = ["layer", "head"].map((what) => byId(`${side}-${what}`).selectedIndex);
  const which = mask.which(...place);
  return { mask, which, cells: mask.cells(which), name: `${mask.name}, ${mask.headName(...place)}` };
}

// A byte per cell that says who keeps it, over the tokens that both have, and the number of cells of each kind.
function pair(one, other) {
  const size = Math.min(one.mask.size, other.mask.size);
  const codes = new Uint8Array(size * size);
  const counts = [0, 0, 0, 0];
  for (let row = 0, place = 0; row < size; row++) {
    for (let column = 0; column < size; column++, place++) {
      const first = one.cells[row * one.mask.size + column] ? LEFT : NEITHER;
      const second = other.cells[row * other.mask.size + column] ? RIGHT : NEITHER;
      counts[(codes[place] = first | second)]++;
    }
  }
  return { size, codes, counts };
}

function drawComparison() {
  const [left, right] = sides.map(sideOf);
  const room = byId("comparison").clientWidth;
  const side = Math.min(room > 700 ? (room - 48) / 3 : room, 420);
  for (const [index, { mask, which, cells, name }] of [left, right].entries()) {
    const canvas = element("canvas", { role: "img", "aria-label": `${name}: ${percent(mask.removed[which])} removed` });
    paint(canvas, cells, mask.size, inkOfShare(), side);
    byId(`${sides[index]}-picture`).replaceChildren(canvas);
    byId(`${sides[index]}-picture`).previousElementSibling.textContent = name;
  }
  const figure = byId("both-picture").parentElement;
  const fits = left.mask.step === right.mask.step && (left.mask.step === 1 || left.mask.drawn === right.mask.drawn);
  figure.hidden = !fits;
  if (!fits) {
    byId("overlap").textContent = "One of the two is drawn reduced and the other otherwise: they cannot be laid over each other.";
    return;
  }
  const { size, codes, counts } = pair(left, right);
  const words = ["removed by both", "kept only by the left one", "kept only by the right one", "kept by both"];
  const what = left.mask.step === 1 ? "entries" : `cells of ${left.mask.step} x ${left.mask.step} entries`;
  const kept = counts[LEFT] + counts[RIGHT] + counts[BOTH];
  const share = kept ? percent(counts[BOTH] / kept) : "none, since both are empty";
  const shorter = left.mask.size === right.mask.size ? "" : ` over the first ${size} tokens, which both have`;
  byId("overlap").textContent =
    `Overlap (Jaccard)${shorter}: ${share}. Of ${count(kept)} ${what} that either keeps, both keep ${count(counts[BOTH])}, ` +
    `only the left one ${count(counts[LEFT])}, only the right one ${count(counts[RIGHT])}.`;
  bothViewer.show(codes, size, inkOfPair(), side, byId("overlap").textContent, (row, column) => {
    const name = left.mask.step === 1 ? `Query ${row}, key ${column}` : `Cell in row ${row}, column ${column}`;
    return `${name}: ${words[codes[row * size + column]]}.`;
  });
}

function onMask() {
  fillLayersAndHeads(shown(), byId("profile-layer"), byId("profile-head"), true);
  fillGrid();
  drawProfile();
}

function onSide(side) {
  fillLayersAndHeads(masks[byId(`${side}-mask`).selectedIndex], byId(`${side}-layer`), byId(`${side}-head`), false);
}

async function start() {
  for (const fields of JSON.parse(byId("data").textContent)) masks.push(await Mask.read(fields));
  const names = masks.map((mask) => mask.name);
  ["mask", "left-mask", "right-mask"].forEach((id) => choices(byId(id), names));
  byId("mask").parentElement.hidden = masks.length === 1;
  byId("right-mask").selectedIndex = masks.length > 1 ? 1 : 0;
  onMask();
  sides.forEach(onSide);
  if (masks.length === 1) {
    // Two heads of the one mask that differ.
    const [mask] = masks;
    const places = mask.heads.flatMap((heads, layer) => heads.map((which, head) => [which, layer, head]));
    const [, layer, head] = places.find(([which]) => which !== places[0][0]) ?? places[places.length > 1 ? 1 : 0];
    byId("right-layer").selectedIndex = layer;
    byId("right-head").selectedIndex = head;
  }
  drawComparison();
  byId("mask").addEventListener("change", onMask);
  ["profile-layer", "profile-head"].forEach((id) => byId(id).addEventListener("change", drawProfile));
  for (const side of sides) {
    byId(`${side}-mask`).addEventListener("change", () => onSide(side));
    ["mask", "layer", "head"].forEach((what) => byId(`${side}-${what}`).addEventListener("change", drawComparison));
  }
  const redraw = () => [paintGrid, drawProfile, drawComparison, drawZoom].forEach((draw) => draw());
  repaints.push(redraw);
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
}

start().catch((error) => {
  byId("failure").textContent = `The pictures cannot be shown: ${error.message}`;
  byId("failure").hidden = false;
  throw error;
});
