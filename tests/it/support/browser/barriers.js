// Problems that keep users from using the page, as far as the document and its style show them.
(() => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const named = (element) => {
    const text = element.textContent.trim().replace(/\s+/g, " ").slice(0, 40);
    return `<${element.tagName.toLowerCase()}> "${text}"`;
  };

  if (!document.documentElement.lang) found.push("the page has no language");
  if (!document.title.trim()) found.push("the page has no title");
  const titles = all("h1").length;
  if (titles !== 1) found.push(`${titles} h1 instead of one`);
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) found.push(`${named(heading)} follows a heading of level ${level}`);
    level = next;
  }
  const ids = new Set();
  for (const { id } of all("[id]")) {
    if (ids.has(id)) found.push(`the id ${id} is there twice`);
    ids.add(id);
  }
  for (const element of all("[tabindex]")) {
    if (element.tabIndex > 0) found.push(`${named(element)} jumps the order of the Tab key`);
  }
  for (const head of all("th:not([scope])")) found.push(`${named(head)} has no scope`);
  const over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (over > 0) found.push(`the page is ${over} px wider than the window`);

  // Contrast as WCAG 2 defines it. Painting with a colour reads any notation of it.
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    brush.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      brush.fillStyle = colour;
      brush.fillRect(0, 0, 1, 1);
    }
    return [...brush.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // The colours behind an element, beginning with that of the window.
  const behind = (element) => {
    const above = [];
    for (let at = element; at; at = at.parentElement) above.unshift(getComputedStyle(at).backgroundColor);
    return [matchMedia("(prefers-color-scheme: dark)").matches ? "#121212" : "white", ...above];
  };
  const told = new Set();
  const compare = (element, what, colour, grounds, least) => {
    const [low, high] = [light(paint(grounds)), light(paint([...grounds, colour]))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    const about = `${what}: ${colour} on ${grounds.join()}`;
    if (ratio < least && !told.has(about)) {
      told.add(about); // one report for all elements that look alike
      found.push(`${named(element)} has ${what} of ${ratio.toFixed(1)} instead of ${least}`);
    }
  };
  const drawn = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  for (const element of all("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!says || element.closest("script, style, noscript, title, :disabled") || !drawn(element)) continue;
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    compare(element, "a contrast", colour, behind(element), least);
  }
  // Without its border, a field cannot be told from the page.
  for (const element of all("input:not([type=checkbox], [type=radio]), select, textarea")) {
    if (element.closest(":disabled") || !drawn(element)) continue;
    const { borderTopStyle, borderTopWidth, borderTopColor } = getComputedStyle(element);
    if (borderTopStyle === "none" || borderTopWidth === "0px") found.push(`${named(element)} has no border`);
    else compare(element, "a border with a contrast", borderTopColor, behind(element.parentElement), 3);
  }
  return found;
})()
