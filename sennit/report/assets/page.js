"use strict";
// Draws the panels of #report-data. All styling of plots is here; colours come from the style sheet's variables.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const narrow = window.matchMedia("(max-width: 560px)");
  const view = { axis: "step", range: null, log: {} };
  const axisTitles = { step: "step", tokens: "tokens", minutes: "minutes of training" };
  for (const panel of data.panels) view.log[panel.key] = panel.log;

  const color = (role) => getComputedStyle(document.documentElement).getPropertyValue("--" + role).trim();
  const element = (key) => document.getElementById("plot-" + key);

  // Steps to the chosen horizontal axis, by straight lines between the points of the table.
  function toAxis(steps) {
    if (view.axis === "step") return steps;
    const [from, to] = data.axes[view.axis];
    let at = 0;
    return steps.map((step) => {
      if (step < from[at]) at = 0;
      while (at < from.length - 2 && from[at + 1] < step) at += 1;
      const share = (step - from[at]) / (from[at + 1] - from[at] || 1);
      return Math.max(to[at] + share * (to[at + 1] - to[at]), 0);
    });
  }

  // The whole run on the chosen axis, with a little room for marks at its ends.
  function whole() {
    const steps = data.panels.flatMap((panel) => panel.traces.flatMap((t) => [t.x[0], t.x[t.x.length - 1]]));
    const [low, high] = toAxis([Math.min(...steps), Math.max(...steps)]);
    const room = 0.02 * (high - low) || 0.5;
    return [low - room, high + room];
  }

  function traceOf(panel, trace) {
    const tint = color(trace.color);
    const base = { name: trace.name, x: toAxis(trace.x), y: trace.y, type: "scatter", mode: "lines", connectgaps: false };
    base.hovertemplate = "%{y:.5~g}";
    switch (trace.style) {
      case "line": base.line = { color: tint, width: 2 }; break;
      case "faint": base.line = { color: tint, width: 1.2 }; base.opacity = 0.45; break;
      case "dashed": base.line = { color: tint, width: 1.5, dash: "dash" }; break;
      case "points":
        base.mode = trace.x.length > 100 ? "lines" : "lines+markers";
        base.line = { color: tint, width: 2 };
        base.marker = { color: tint, size: 6 };
        break;
      case "diamond":
      case "cross":
        base.mode = "markers";
        base.marker = { color: tint, size: 8, symbol: trace.style === "cross" ? "x" : "diamond", line: { color: color("card"), width: 1 } };
        if (trace.texts) { base.text = trace.texts; base.hovertemplate = "%{text}"; }
        break;
      case "stack":
        base.stackgroup = "one";
        base.line = { color: tint, width: 0.5 };
        base.fillcolor = tint;
        break;
      case "hidden": base.line = { color: tint, width: 0 }; base.opacity = 0; base.showlegend = false; break;
    }
    if (trace.x.length === 1 && base.mode === "lines") { base.mode = "markers"; base.marker = { color: tint, size: 7 }; }
    if (trace.right) base.yaxis = "y2";
    return base;
  }

  function axisStyle(extra) {
    return Object.assign({
      gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("line"), tickcolor: color("line"),
      tickfont: { color: color("muted"), size: 11 }, automargin: true, exponentformat: "SI",
    }, extra);
  }

  const axisTitle = (text) => ({ text, font: { color: color("muted"), size: 12 }, standoff: 8 });

  function baseLayout() {
    return {
      autosize: true,
      height: narrow.matches ? 260 : 300,
      margin: { l: 12, r: 12, t: 8, b: 12 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("text"), size: 12 },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
      dragmode: narrow.matches ? false : "zoom",
    };
  }

  function layoutOf(panel) {
    const layout = baseLayout();
    const log = view.log[panel.key];
    layout.hovermode = "x unified";
    layout.showlegend = panel.traces.filter((t) => t.style !== "hidden").length > 1;
    if (narrow.matches) Object.assign(layout.legend, { entrywidthmode: "fraction", entrywidth: 0.47, x: -0.05 });
    if (panel.traces.every((t) => t.style === "stack")) layout.legend.traceorder = "normal";
    layout.xaxis = axisStyle({ title: axisTitle(axisTitles[view.axis]), showgrid: false, showline: true, ticks: "outside", hoverformat: ",.6~g" });
    layout.xaxis.range = (view.range || whole()).slice();
    layout.yaxis = axisStyle({ title: axisTitle(panel.yAxis), type: log ? "log" : "linear", rangemode: panel.fromZero ? "tozero" : "normal" });
    if (panel.yMax && !log) layout.yaxis.range = [0, panel.yMax];
    if (panel.rightAxis) {
      layout.yaxis2 = axisStyle({
        title: axisTitle(panel.rightAxis), overlaying: "y", tickmode: "auto", side: "right", showgrid: false,
        type: log ? "log" : "linear", rangemode: "tozero",
      });
    }
    const upright = toAxis(data.resumes);
    layout.shapes = upright.map((x) => ({
      type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: color("resume"), width: 1.5, dash: "dot" },
    }));
    return layout;
  }

  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: false };

  function drawShares() {
    if (!data.shares) return;
    const parts = data.shares.parts.slice().reverse();
    const layout = baseLayout();
    const longest = Math.max(...parts.map((p) => p.percent), 1);
    layout.showlegend = false;
    layout.xaxis = axisStyle({ title: axisTitle("% of the recorded time"), range: [0, longest * (narrow.matches ? 1.9 : 1.35)], zeroline: false, fixedrange: true });
    layout.yaxis = axisStyle({ fixedrange: true, ticksuffix: " " });
    layout.bargap = 0.35;
    const trace = {
      type: "bar", orientation: "h", x: parts.map((p) => p.percent), y: parts.map((p) => p.name), text: parts.map((p) => p.text),
      textposition: "outside", cliponaxis: false, textfont: { color: color("text"), size: 12 },
      marker: { color: parts.map((p) => color(p.color)) }, hovertemplate: "%{y}: %{text}<extra></extra>",
    };
    return Plotly.react(element(data.shares.key), [trace], layout, config);
  }

  function draw() {
    for (const panel of data.panels) {
      Plotly.react(element(panel.key), panel.traces.map((t) => traceOf(panel, t)), layoutOf(panel), config);
    }
    drawShares();
  }

  // Zooming one panel zooms all: they share the horizontal axis.
  let following = false;
  function follow(panel, change) {
    if (following) return;
    const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
    if (from === undefined && !change["xaxis.autorange"]) return;
    view.range = from === undefined ? null : [from, to];
    following = true;
    const update = { "xaxis.range": (view.range || whole()).slice() };
    const others = data.panels.filter((other) => other.key !== panel.key);
    Promise.all(others.map((other) => Plotly.relayout(element(other.key), update))).finally(() => { following = false; });
  }

  draw();
  for (const panel of data.panels) element(panel.key).on("plotly_relayout", (change) => follow(panel, change));

  for (const button of document.querySelectorAll("[data-axis]")) {
    const axis = button.dataset.axis;
    if (axis !== "step" && !data.axes[axis]) { button.hidden = true; continue; }
    button.addEventListener("click", () => {
      view.axis = axis;
      view.range = null;
      for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
  for (const button of document.querySelectorAll("[data-log]")) {
    const key = button.dataset.log;
    const panel = data.panels.find((p) => p.key === key);
    if (panel.traces.some((t) => t.style === "stack")) { button.hidden = true; continue; }
    button.setAttribute("aria-pressed", String(view.log[key]));
    button.addEventListener("click", () => {
      view.log[key] = !view.log[key];
      button.setAttribute("aria-pressed", String(view.log[key]));
      Plotly.react(element(key), panel.traces.map((t) => traceOf(panel, t)), layoutOf(panel), config);
    });
  }
  document.addEventListener("themechange", draw);
  narrow.addEventListener("change", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
