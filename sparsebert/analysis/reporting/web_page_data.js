// The masks of the page, from what `mask_data` wrote.
const byId = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const count = (number) => number.toLocaleString("en");

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...children);
  return made;
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Mask {
  static async read(fields) {
    const mask = Object.assign(new Mask(), fields);
    mask.picture = await unpacked(fields.picture);
    mask.profile = await unpacked(fields.profile);
    mask.different = fields.removed.length;
    return mask;
  }

  // Which of the different heads it is.
  which(layer, head) {
    return this.heads[layer][head];
  }

  layerName(layer) {
    return this.heads.length === 1 ? "All layers" : `Layer ${layer}`;
  }

  headName(layer, head) {
    return `${this.layerName(layer)}, head ${head}`;
  }

  isSpecial(token) {
    const isLast = this.special_tokens === "first_last" && token === this.drawn - 1;
    return isLast || (this.special_tokens !== "none" && token === 0);
  }

  // A byte per cell: the share of its entries that is kept, 255 for all.
  cells(which, withSpecial = true) {
    const { size } = this;
    const stride = this.picture.length / this.different;
    const own = this.picture.subarray(which * stride, (which + 1) * stride);
    if (this.kind === "cells") return own;
    const cells = new Uint8Array(size * size);
    const bit = (place) => ((own[place >> 3] ?? 0) >> (place & 7)) & 1;
    const block = this.block_size ?? 1;
    for (let row = 0, place = 0; row < size; row++) {
      for (let column = 0; column < size; column++, place++) {
        const distance = Math.floor(row / block) - Math.floor(column / block);
        const parameter = this.symmetric ? Math.abs(distance) : distance + this.middle;
        if (bit(this.kind === "entries" ? place : parameter)) cells[place] = 255;
      }
    }
    for (let token = 0; withSpecial && token < size; token++) {
      if (!this.isSpecial(token)) continue;
      if (this.special_rows) cells.fill(255, token * size, (token + 1) * size);
      for (let row = 0; row < size; row++) cells[row * size + token] = 255;
    }
    for (let token = 0; this.diagonal !== null && token < size; token++) {
      cells[token * size + token] = this.diagonal ? 255 : 0;
    }
    return cells;
  }

  // For each tile, row by row, whether it holds an entry outside the special tokens; `null` where cells hide it.
  liveTiles(which, side) {
    if (this.kind === "cells") return null;
    const number = Math.ceil(this.size / side);
    const live = new Uint8Array(number * number);
    const cells = this.cells(which, false);
    for (let row = 0, place = 0; row < this.size; row++) {
      const start = Math.floor(row / side) * number;
      for (let column = 0; column < this.size; column++, place++) {
        if (cells[place]) live[start + Math.floor(column / side)] = 1;
      }
    }
    return live;
  }

  // The share kept at each offset, or each `profile_step` offsets.
  profileOf(which) {
    const stride = this.profile.length / this.different;
    return Array.from(this.profile.subarray(which * stride, (which + 1) * stride), (byte) => byte / 255);
  }

  // Says what is in a cell.
  describe(cells, row, column) {
    const kept = cells[row * this.size + column];
    if (this.step === 1) {
      let keys = 0;
      for (let key = 0; key < this.size; key++) keys += cells[row * this.size + key] > 0;
      const isSpecial = (this.special_rows && this.isSpecial(row)) || this.isSpecial(column);
      const special = isSpecial ? " (special token)" : "";
      const offset = Math.abs(row - column);
      return (
        `Query ${row}, key ${column}, offset ${offset}: ${kept ? "kept" : "removed"}${special}. ` +
        `Query ${row} keeps ${count(keys)} of ${count(this.size)} keys.`
      );
    }
    const range = (cell) => `${cell * this.step} to ${Math.min((cell + 1) * this.step, this.drawn) - 1}`;
    return `Queries ${range(row)}, keys ${range(column)}: ${percent(kept / 255)} kept.`;
  }
}

function choices(select, names) {
  const before = select.selectedIndex;
  select.replaceChildren(...names.map((name, index) => element("option", { value: index }, name)));
  select.selectedIndex = Math.min(Math.max(before, 0), names.length - 1);
}
