// Values under the pointer: read back from the lines themselves, by the axes' ends. The page is whole without it.
for (const svg of document.querySelectorAll("svg.plot")) {
  const [left, right, top, bottom] = svg.dataset.frame.split(",").map(Number);
  const [counted, unit] = svg.dataset.names.split("|");
  const axis = (text) => {
    const [low, high, logarithmic] = text.split(",").map(Number);
    return (part) => (logarithmic ? low * (high / low) ** part : low + part * (high - low));
  };
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
  const lines = [...svg.querySelectorAll("path[data-name]")].map((path) => {
    const numbers = path.getAttribute("d").match(/-?[\d.]+/g).map(Number);
    const points = numbers.flatMap((_, at) => (at % 2 ? [] : [{ x: numbers[at], y: numbers[at + 1] }]));
    return { name: path.dataset.name, style: path.parentNode.getAttribute("class"), points };
  });
  const shown = (value) => {
    const size = Math.abs(value);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : size && size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  };
  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const tip = svg.parentNode.querySelector(".tip"), rule = svg.querySelector(".rule");
  // A title in the picture would be shown over the values: its words and the description become one label.
  const title = svg.querySelector("title");
  svg.setAttribute("aria-label", `${title.textContent}. ${svg.querySelector("desc").textContent}`);
  svg.removeAttribute("aria-labelledby");
  title.remove();
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    const nearest = (line) => line.points.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
    const found = lines.map((line) => ({ ...line, point: nearest(line) })).sort((a, b) => a.point.y - b.point.y);
    if (!found.length || at < left - 8 || at > right + 8) return hide();
    const here = found.map((line) => line.point.x).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const step = x((here - left) / (right - left));
    const near = found.filter((line) => Math.abs(line.point.x - here) <= 6);
    tip.replaceChildren(element("b", `${counted} ${Math.round(step).toLocaleString("en")}`), ...near.map((line) => {
      const row = element("div", ""), value = shown(y((bottom - line.point.y) / (bottom - top)));
      const swatch = svg.closest("figure").querySelector("svg.plot").cloneNode(false);
      for (const name of swatch.getAttributeNames()) swatch.removeAttribute(name);
      swatch.setAttribute("class", `swatch ${line.style}`);
      swatch.setAttribute("viewBox", "0 0 26 8");
      swatch.append(document.createElementNS(swatch.namespaceURI, "path"));
      swatch.firstChild.setAttribute("d", "M0 4 H26");
      row.append(swatch, line.name, element("span", unit ? `${value} ${unit}` : value));
      return row;
    }));
    for (const [name, value] of Object.entries({ x1: here, x2: here, y1: top, y2: bottom })) rule.setAttribute(name, value);
    rule.removeAttribute("hidden");
    tip.hidden = false;
    const middle = here / scale, width = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(box.width - width, middle < box.width / 2 ? middle + 14 : middle - width - 14))}px`;
  });
  const hide = () => { tip.hidden = true; rule.setAttribute("hidden", ""); };
  svg.addEventListener("pointerleave", hide);
}
