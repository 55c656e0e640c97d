"use strict";
// What the server cannot do: say whether the connection stands, let ages grow, draw curves.
(() => {
  const body = document.body;
  const said = (state) => () => { if (body.dataset.link !== "over") body.dataset.link = state; };
  document.addEventListener("htmx:sse:after:connection", said("live"));
  document.addEventListener("htmx:sse:error", said("lost"));
  document.addEventListener("htmx:sse:before:connection", (event) => {
    if (event.detail.connection.attempt > 0) said("lost")();
  });
  // The queue's next run is at the same address, once it has begun.
  const follow = async () => {
    if (!document.querySelector("#head [data-next]")) return;
    try {
      const answer = await fetch("/snapshot.json");
      if (answer.ok && (await answer.json()).run !== body.dataset.run) return location.reload();
    } catch { /* between two runs */ }
    setTimeout(follow, 1000);
  };
  document.addEventListener("over", () => { body.dataset.link = "over"; follow(); });
  document.addEventListener("htmx:after:request", async (event) => {
    const response = event.detail.ctx?.response, place = document.querySelector(".answer");
    if (place && event.detail.ctx?.request?.method === "POST") {
      place.textContent = response?.raw?.ok ? "" : event.detail.ctx.text || "The coordinator did not answer.";
    }
  });

  const seconds = (value) => {
    if (value < 60) return `${Math.round(value)} s`;
    const minutes = Math.floor(value / 60);
    return minutes < 60 ? `${minutes} min ${String(Math.round(value % 60)).padStart(2, "0")} s` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  };
  // The server's clock: the browser's may be wrong.
  let ahead = 0;
  const age = () => {
    for (const time of document.querySelectorAll("time[data-at]")) {
      time.textContent = seconds(Math.max(0, Date.now() / 1000 + ahead - Number(time.dataset.at)));
    }
  };
  const clock = () => { ahead = Number(document.querySelector("#head [data-now]")?.dataset.now ?? Date.now() / 1000) - Date.now() / 1000; };
  setInterval(() => { if (body.dataset.link === "live") age(); }, 1000);

  const charts = new Map();
  const dashes = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 4]];
  const style = (name) => getComputedStyle(body).getPropertyValue(name).trim();
  const draw = (figure, again) => {
    const known = charts.get(figure);
    if (known && known.text === figure.dataset.plot && !again) return;
    const plot = JSON.parse(figure.dataset.plot);
    const rounds = [...new Set(plot.lines.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
    const data = [rounds, ...plot.lines.map(([, points]) => { const at = new Map(points); return rounds.map((x) => at.get(x) ?? null); })];
    const words = [[0, rounds.map((x) => [x, 0, x])], ...plot.lines].map(([, points]) => new Map(points.map(([x, , y]) => [x, y])));
    if (known && !again && known.words.length === words.length) {
      Object.assign(known, { words, text: figure.dataset.plot });
      known.chart.setData(data);
      return;
    }
    known?.chart.destroy();
    const made = { words, text: figure.dataset.plot };
    const grid = { stroke: style("--line"), width: 1 };
    const axis = { stroke: style("--muted"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    // Pointed at nothing: the newest value.
    const shown = (chart, _, n, at) => {
      const texts = made.words[n];
      return (at == null ? [...texts.values()].at(-1) : texts.get(chart.data[0][at])) ?? "—";
    };
    const stripe = (n) => {
      const colour = style(`--c${n % 6}`);
      let from = 0;
      const stops = dashes[n % 6].map((length, k) => `${k % 2 ? "transparent" : colour} ${from}px ${from += length}px`);
      return from ? `repeating-linear-gradient(90deg,${stops})` : colour;
    };
    made.chart = new uPlot({
      width: figure.clientWidth, height: 230, title: plot.title + (plot.unit && `, ${plot.unit}`),
      scales: { x: { time: false, range: (_, low, high) => [Math.min(low, 1), Math.max(high, low + 1)] } },
      axes: [{ ...axis, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], values: (_, marks) => marks.map((x) => x) }, { ...axis, size: 46 }],
      legend: { markers: { width: 0, fill: (_, n) => n && stripe(n - 1) } },
      series: [{ label: "round", value: shown }, ...plot.lines.map(([label], n) => ({
        label, width: 2, spanGaps: true, stroke: style(`--c${n % 6}`), dash: dashes[n % 6],
        points: { show: rounds.length < 40, size: 6 }, value: shown,
      }))],
    }, data, figure);
    charts.set(figure, made);
  };
  const all = (again) => document.querySelectorAll(".plot").forEach((figure) => draw(figure, again));
  new MutationObserver(() => { clock(); all(false); }).observe(document.querySelector("main"), { subtree: true, childList: true, attributeFilter: ["data-plot"] });
  new MutationObserver(clock).observe(document.querySelector("#head"), { subtree: true, attributeFilter: ["data-now"] });
  addEventListener("resize", () => charts.forEach(({ chart }, figure) => chart.setSize({ width: figure.clientWidth, height: 230 })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all(true));
  clock();
  all(false);
})();
