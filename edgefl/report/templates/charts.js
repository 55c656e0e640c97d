// Swaps each figure's static SVG for the interactive view of the same spec, once it comes near the screen.
const narrow = matchMedia("(max-width: 720px)");
const tip = document.createElement("div");
tip.id = "tip";
document.body.append(tip);

function show(_, event, item, value) {
  const rows = value && typeof value === "object" ? Object.entries(value) : [];
  tip.replaceChildren(...rows.map(([name, text]) => {
    const row = document.createElement("div"), label = document.createElement("span");
    label.textContent = name;
    row.append(label, String(text));
    return row;
  }));
  tip.style.display = rows.length ? "block" : "none";
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}

async function draw(figure) {
  const name = narrow.matches ? "narrow" : "wide", place = figure.querySelector("." + name);
  if (place.dataset.live) return;
  place.dataset.live = "yes";
  const held = JSON.parse(figure.querySelector("script").textContent);
  if (held.rows) held[name].data = {values: held.rows};
  const box = document.createElement("div");
  await vegaEmbed(box, held[name], {mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: show});
  place.replaceChildren(box);
}

const figures = document.querySelectorAll("figure:has(> script)");
const near = new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) draw(one.target);
}, {rootMargin: "400px"});
figures.forEach((one) => near.observe(one));
narrow.addEventListener("change", () => figures.forEach((one) => { near.unobserve(one); near.observe(one); }));
