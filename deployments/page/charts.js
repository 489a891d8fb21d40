// Small charts, drawn by hand as SVG. Numbers only ever become attributes of shapes.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function draw(svg, width, height, label, shapes) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  if (label) svg.setAttribute("aria-label", label);
  svg.replaceChildren(...shapes);
}

/** Values over time, oldest first; null leaves a gap. */
export function line(svg, values, label, { area = false } = {}) {
  const width = 200, height = 40;
  const top = Math.max(1e-9, ...values.filter((value) => value !== null)) * 1.08;
  const x = (i) => (values.length > 1 ? (i / (values.length - 1)) * width : width);
  const y = (value) => height - (value / top) * height;
  let path = "", pen = false;
  values.forEach((value, i) => {
    if (value === null) { pen = false; return; }
    // A point between gaps shows as a dot: a line of no length with round ends.
    path += `${pen ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(2)}${pen ? "" : "h0"}`;
    pen = true;
  });
  const shapes = [shape("path", { class: "base", d: `M0 ${height}H${width}` })];
  if (area && path) {
    const points = values.map((value, i) => `L${x(i).toFixed(1)} ${y(value ?? 0).toFixed(2)}`).join("");
    shapes.push(shape("path", { class: "area", d: `M0 ${height}${points}L${width} ${height}Z` }));
  }
  if (path) shapes.push(shape("path", { class: "line", d: path }));
  draw(svg, width, height, label, shapes);
}

/** Shares from 0 to 1 as columns, each on a track. */
export function columns(svg, shares, label) {
  const height = 40, step = 10;
  const shapes = shares.flatMap((share, i) => [
    shape("rect", { class: "track", x: i * step + 1, y: 0, width: step - 2, height }),
    shape("rect", { class: "bar", x: i * step + 1, y: height * (1 - share), width: step - 2, height: height * share }),
  ]);
  draw(svg, Math.max(1, shares.length) * step, height, label, shapes);
}

/** One share from 0 to 1 as a horizontal bar. */
export function bar(svg, share) {
  draw(svg, 100, 10, "", [
    shape("rect", { class: "track", x: 0, y: 0, width: 100, height: 10 }),
    shape("rect", { class: "bar", x: 0, y: 0, width: 100 * Math.min(1, Math.max(0, share)), height: 10 }),
  ]);
}
