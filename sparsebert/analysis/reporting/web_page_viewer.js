// Pictures: squares of cells at the pixels of the device, and a cross in them that keys and the pointer move.
function color(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}

// For each byte of a cell the color and how much of it shows.
const inkOfShare = () => {
  const ink = color("--kept");
  return Array.from({ length: 256 }, (_, byte) => [...ink, byte / 255]);
};
const NEITHER = 0, LEFT = 1, RIGHT = 2, BOTH = 3;
const inkOfPair = () => [[0, 0, 0, 0], ...["--left", "--right", "--shared"].map((name) => [...color(name), 1])];

// Paints cells into a canvas about `side` CSS pixels wide. Where an entry is smaller than a pixel, the pixel shows the
// mean of its entries, strengthened, since a diagonal would hardly be seen.
function paint(canvas, cells, size, inks, side) {
  const wanted = Math.max(Math.round(side * devicePixelRatio), 1);
  const pixels = wanted >= size ? Math.floor(wanted / size) * size : wanted;
  canvas.width = canvas.height = pixels;
  canvas.style.width = canvas.style.height = `${pixels / devicePixelRatio}px`;
  const context = canvas.getContext("2d");
  const image = context.createImageData(pixels, pixels);
  const paper = color("--removed");
  const bounds = Array.from({ length: pixels + 1 }, (_, pixel) => Math.floor((pixel * size) / pixels));
  for (let y = 0, place = 0; y < pixels; y++) {
    const top = bounds[y], bottom = Math.max(bounds[y + 1], top + 1);
    for (let x = 0; x < pixels; x++, place += 4) {
      const left = bounds[x], right = Math.max(bounds[x + 1], left + 1);
      let red = 0, green = 0, blue = 0, weight = 0;
      for (let row = top; row < bottom; row++) {
        for (let column = left; column < right; column++) {
          const ink = inks[cells[row * size + column]];
          weight += ink[3];
          red += ink[0] * ink[3];
          green += ink[1] * ink[3];
          blue += ink[2] * ink[3];
        }
      }
      const strength = Math.sqrt(weight / ((bottom - top) * (right - left)));
      const part = weight ? strength / weight : 0;
      image.data[place] = red * part + paper[0] * (1 - strength);
      image.data[place + 1] = green * part + paper[1] * (1 - strength);
      image.data[place + 2] = blue * part + paper[2] * (1 - strength);
      image.data[place + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

// Outlines the tiles that hold an entry and dims the others.
function paintTiles(canvas, live, side, size) {
  const context = canvas.getContext("2d");
  const scale = canvas.width / size;
  const number = Math.ceil(size / side);
  const [red, green, blue] = color("--tile");
  const width = Math.max(Math.round(devicePixelRatio), 1) * (side * scale < 12 ? 1 : 2);
  live.forEach((isLive, index) => {
    const start = [index % number, Math.floor(index / number)].map((tile) => Math.round(tile * side * scale));
    const end = [index % number, Math.floor(index / number)].map((tile) =>
      Math.round(Math.min((tile + 1) * side, size) * scale),
    );
    const [x, y, right, bottom] = [...start, ...end];
    if (!isLive) return;
    context.fillStyle = `rgb(${red} ${green} ${blue} / 0.12)`;
    context.fillRect(x, y, right - x, bottom - y);
    context.strokeStyle = `rgb(${red} ${green} ${blue})`;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, right - x - width, bottom - y - width);
  });
}

class Viewer {
  constructor(place, readout, name) {
    this.place = place;
    this.readout = readout;
    this.canvas = element("canvas", { role: "img" });
    this.lines = ["across", "down"].map((kind) => element("div", { class: `cross ${kind}` }));
    const attributes = { class: "viewer", tabindex: "0", role: "application", "aria-label": name };
    this.frame = element("div", attributes, this.canvas, ...this.lines);
    this.frame.setAttribute("aria-describedby", readout.id);
    place.replaceChildren(this.frame);
    this.row = this.column = 0;
    this.frame.addEventListener("keydown", (event) => this.onKey(event));
    this.frame.addEventListener("pointermove", (event) => this.onPointer(event));
    this.frame.addEventListener("pointerdown", (event) => this.onPointer(event));
  }

  show(cells, size, inks, side, label, describe) {
    Object.assign(this, { size, tell: describe });
    paint(this.canvas, cells, size, inks, side);
    this.canvas.setAttribute("aria-label", label);
    this.move(this.row, this.column, false);
  }

  move(row, column, isSpoken = true) {
    this.row = Math.min(Math.max(row, 0), this.size - 1);
    this.column = Math.min(Math.max(column, 0), this.size - 1);
    const cell = this.canvas.clientWidth / this.size;
    this.lines[0].style.top = `${(this.row + 0.5) * cell}px`;
    this.lines[1].style.left = `${(this.column + 0.5) * cell}px`;
    this.readout.setAttribute("aria-live", isSpoken ? "polite" : "off");
    this.readout.textContent = this.tell(this.row, this.column);
    if (!isSpoken) return;
    // The cross stays in sight where the picture scrolls.
    for (const [start, extent, at] of [["scrollTop", "clientHeight", this.row], ["scrollLeft", "clientWidth", this.column]]) {
      const middle = (at + 0.5) * cell;
      const { [start]: from, [extent]: shown } = this.place;
      if (middle < from + 16 || middle > from + shown - 16) this.place[start] = middle - shown / 2;
    }
  }

  onKey(event) {
    const far = event.shiftKey ? 16 : 1;
    const moves = {
      ArrowUp: [this.row - far, this.column],
      ArrowDown: [this.row + far, this.column],
      ArrowLeft: [this.row, this.column - far],
      ArrowRight: [this.row, this.column + far],
      Home: [this.row, 0],
      End: [this.row, this.size - 1],
    };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.move(...moves[event.key]);
  }

  onPointer(event) {
    const box = this.canvas.getBoundingClientRect();
    const cell = box.width / this.size;
    this.move(Math.floor((event.clientY - box.top) / cell), Math.floor((event.clientX - box.left) / cell), false);
  }
}
