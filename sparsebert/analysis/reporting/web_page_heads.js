// The grid of heads, and the dialog that enlarges one.
const masks = [];
const shown = () => masks[byId("mask").selectedIndex];
const zoom = byId("zoom");
const zoomViewer = new Viewer(byId("zoom-picture"), byId("zoom-readout"), "Entries of the mask; the arrow keys move the cross");
let zoomed = null;

function numberOf(mask, which) {
  const figure = byId("figure").value;
  return figure === "removed" ? mask.removed[which] : mask.tiles[figure][which];
}

function fillGrid() {
  const mask = shown();
  const heading = element("tr", {}, element("td"));
  mask.heads[0].forEach((_, head) => heading.append(element("th", { scope: "col" }, `Head ${head}`)));
  const rows = mask.heads.map((heads, layer) => {
    const row = element("tr", {}, element("th", { scope: "row" }, mask.layerName(layer)));
    heads.forEach((which, head) => {
      const button = element("button", { type: "button", class: "head", tabindex: layer + head ? "-1" : "0" });
      button.append(element("canvas", { "aria-hidden": "true" }), element("span", { class: "number" }));
      Object.assign(button.dataset, { layer, head });
      row.append(element("td", {}, button));
    });
    return row;
  });
  byId("grid").replaceChildren(element("thead", {}, heading), element("tbody", {}, ...rows));
  const notes = [];
  if (mask.step > 1) {
    notes.push(`${mask.name} is drawn reduced: a cell stands for ${mask.step} x ${mask.step} entries.`);
  }
  if (mask.drawn < mask.length) notes.push(`Only the first ${mask.drawn} of ${mask.length} tokens are drawn.`);
  byId("reduced").textContent = notes.join(" ");
  byId("reduced").hidden = !notes.length;
  fillNumbers();
  paintGrid();
}

const headButtons = () => [...byId("grid").querySelectorAll("button")];
const headOf = (button) => [Number(button.dataset.layer), Number(button.dataset.head)];

function fillNumbers() {
  const mask = shown();
  const [figure] = byId("figure").selectedOptions;
  headButtons().forEach((button) => {
    const number = (100 * numberOf(mask, mask.which(...headOf(button)))).toFixed(1);
    button.querySelector(".number").textContent = number;
    const what = figure.textContent.replace(", %", "");
    button.setAttribute("aria-label", `${mask.headName(...headOf(button))}: ${what} ${number} %. Enlarge.`);
  });
}

let painting = 0;
async function paintGrid() {
  const mask = shown();
  const mine = ++painting;
  const room = byId("grid").parentElement.clientWidth - 90;
  const side = Math.min(Math.max(Math.floor(room / mask.heads[0].length) - 14, 52), 128);
  const inks = inkOfShare();
  const painted = new Map();
  for (const button of headButtons()) {
    const canvas = button.querySelector("canvas");
    const which = mask.which(...headOf(button));
    const same = painted.get(which);
    if (same) {
      canvas.width = canvas.height = same.width;
      canvas.style.width = canvas.style.height = same.style.width;
      canvas.getContext("2d").drawImage(same, 0, 0);
      continue;
    }
    paint(canvas, mask.cells(which), mask.size, inks, side);
    painted.set(which, canvas);
    // Between heads the page may answer, or begin anew.
    await new Promise(requestAnimationFrame);
    if (mine !== painting) return;
  }
}

function onGridKey(event) {
  const mask = shown();
  const button = event.target.closest("button");
  if (!button || event.altKey || event.ctrlKey || event.metaKey) return;
  const [layer, head] = headOf(button);
  const last = [mask.heads.length - 1, mask.heads[0].length - 1];
  const moves = {
    ArrowUp: [layer - 1, head],
    ArrowDown: [layer + 1, head],
    ArrowLeft: [layer, head - 1],
    ArrowRight: [layer, head + 1],
    Home: [layer, 0],
    End: [layer, last[1]],
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const [row, column] = moves[event.key].map((place, axis) => Math.min(Math.max(place, 0), last[axis]));
  focusHead(row, column);
}

function focusHead(layer, head) {
  headButtons().forEach((button) => {
    const [row, column] = headOf(button);
    const isIt = row === layer && column === head;
    button.tabIndex = isIt ? 0 : -1;
    if (isIt) button.focus();
  });
}

function openZoom(layer, head) {
  zoomed = [layer, head];
  if (!zoom.open) zoom.showModal();
  drawZoom();
  zoomViewer.frame.focus();
}

function fitting() {
  return Math.max(Math.min(zoom.clientWidth - 44, innerHeight - 290), 200);
}

function drawZoom() {
  if (!zoom.open) return;
  const mask = shown();
  const which = mask.which(...zoomed);
  const cells = mask.cells(which);
  const name = mask.headName(...zoomed);
  const side = fillScales(mask);
  const order = mask.heads.flatMap((heads, layer) => heads.map((_, head) => [layer, head]));
  const place = order.findIndex(([layer, head]) => layer === zoomed[0] && head === zoomed[1]);
  byId("previous").disabled = place === 0;
  byId("next").disabled = place === order.length - 1;
  byId("zoom-title").textContent = `${mask.name}: ${name}`;
  const removed = `${percent(mask.removed[which])} of the entries removed`;
  const label = `Picture of the mask of ${name}, ${mask.drawn} tokens, ${removed}`;
  zoomViewer.show(cells, mask.size, inkOfShare(), side, label, (row, column) => mask.describe(cells, row, column));
  byId("zoom-facts").textContent = `${removed}. ${tilesOf(mask, which)}`;
}

// Outlines live tiles if asked to, and says how many they are.
function tilesOf(mask, which) {
  const tiles = Number(byId("tiles").value);
  if (!tiles) return "";
  const share = percent(mask.tiles[tiles][which]);
  const live = mask.liveTiles(which, tiles);
  if (!live) return `${share} of the tiles of ${tiles} x ${tiles} hold an entry; in a reduced picture they are not drawn.`;
  paintTiles(zoomViewer.canvas, live, tiles, mask.size);
  const number = live.reduce((sum, isLive) => sum + isLive, 0);
  const special = mask.special_tokens === "none" ? "" : " Rows and columns of special tokens do not count.";
  return `${count(number)} of ${count(live.length)} tiles of ${tiles} x ${tiles} hold an entry (${share}, outlined).${special}`;
}

// Offers the sizes that are larger than the one that fits, and returns the chosen one in CSS pixels.
function fillScales(mask) {
  const select = byId("scale");
  const chosen = select.value || "fit";
  const fit = fitting();
  const scales = [1, 2, 4, 8, 16].filter(
    (scale) => mask.size * scale > fit && mask.size * scale * devicePixelRatio <= 4096,
  );
  const options = [["fit", "fits the window"], ...scales.map((scale) => [scale, `${scale} x ${scale} pixels per entry`])];
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = options.some(([value]) => String(value) === chosen) ? chosen : "fit";
  return select.value === "fit" ? fit : mask.size * Number(select.value);
}

function zoomBy(number) {
  const mask = shown();
  const width = mask.heads[0].length;
  const place = zoomed[0] * width + zoomed[1] + number;
  zoomed = [Math.floor(place / width), place % width];
  drawZoom();
}

byId("grid").addEventListener("keydown", onGridKey);
byId("grid").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) openZoom(...headOf(button));
});
byId("figure").addEventListener("change", fillNumbers);
byId("tiles").addEventListener("change", drawZoom);
byId("scale").addEventListener("change", drawZoom);
byId("previous").addEventListener("click", () => zoomBy(-1));
byId("next").addEventListener("click", () => zoomBy(1));
byId("close").addEventListener("click", () => zoom.close());
zoom.addEventListener("close", () => focusHead(...zoomed));
