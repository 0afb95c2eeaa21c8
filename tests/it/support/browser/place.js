// The point at which a mouse would click on the element.
function () {
  this.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
  const [box] = this.getClientRects(); // a link may be drawn in several parts
  if (!box || !box.width || !box.height) throw "it is not drawn";
  if (this.disabled) throw "it is disabled";
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const top = document.elementFromPoint(x, y);
  if (!top) throw "it is out of sight";
  if (!this.contains(top)) throw `it is covered by ${top.outerHTML.slice(0, 200)}`;
  return [x, y];
}
