"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme");
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  label();

  const value = (row, column) => {
    const cell = row.cells[column];
    if ("sort" in cell.dataset) return Number(cell.dataset.sort);
    return cell.classList.contains("missing") ? NaN : cell.textContent;
  };
  const compare = (a, b) => {
    if (typeof a === "number" || typeof b === "number") {
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
      return a - b;
    }
    return a.localeCompare(b, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const sorter = document.createElement("button");
      sorter.type = "button";
      sorter.textContent = head.textContent;
      head.replaceChildren(sorter);
      sorter.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          // Missing values stay last whichever way the column is sorted.
          if (Number.isNaN(x) || Number.isNaN(y)) return compare(x, y);
          return up ? compare(x, y) : compare(y, x);
        };
        body.append(...[...rows].sort(order));
      });
    });
  }

  const series = [...document.querySelectorAll("[data-series]")];
  const focus = (name) => {
    for (const item of series) {
      item.classList.toggle("dim", name !== null && item.dataset.series !== name);
    }
  };
  for (const item of series) {
    item.addEventListener("pointerenter", () => focus(item.dataset.series));
    item.addEventListener("pointerleave", () => focus(null));
  }
})();
