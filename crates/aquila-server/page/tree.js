// The tree of a round, drawn from left to right: a column for each depth.

const SVG = "http://www.w3.org/2000/svg";
const NODE = { width: 67, height: 22, column: 81, row: 29, top: 18, letters: 9 };

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The nodes of a round with the bonus token that the target added, each with its row. */
function placed(round) {
  const nodes = round.tree.map((node, index) => ({ ...node, index, children: [] }));
  const path = nodes.filter((node) => node.accepted);
  const own = round.tokens[path.length - 1];
  for (const node of nodes.slice(1)) nodes[node.parent].children.push(node);
  if (own && !own.drafted) {
    const end = path.at(-1);
    const bonus = { text: own.text, token: own.id, depth: end.depth + 1, bonus: true, children: [] };
    bonus.parent = end.index;
    end.children.unshift(bonus);
    nodes.push(bonus);
  }
  let rows = 0;
  const place = (node) => {
    node.row = rows;
    node.children.forEach(place);
    if (!node.children.length) rows += 1;
  };
  place(nodes[0]);
  return { nodes, rows };
}

function describe(node) {
  if (node.bonus) return `${visible(node.text)} – bonus: the target's own token`;
  if (node.depth === 0) return `${visible(node.text)} – the bonus token of the round before`;
  const what = node.accepted ? "accepted" : "rejected";
  return `${visible(node.text)} – ${what}, depth ${node.depth}, score ${node.score.toPrecision(2)}`;
}

function drawNode(node) {
  const { width, height, column, row, top, letters } = NODE;
  const kind = node.bonus || node.depth === 0 ? "own" : node.accepted ? "accepted" : "rejected";
  const label = visible(node.text);
  const cut = label.length > letters ? `${label.slice(0, letters - 1)}…` : label;
  const group = svg("g", {
    class: `node ${kind} ${kind === "accepted" ? shadeOf(node.depth, true) : ""}`,
    transform: `translate(${node.depth * column + 1} ${node.row * row + top})`,
  });
  const title = svg("title");
  title.textContent = describe(node);
  const text = svg("text", { x: width / 2, y: height / 2 + 4, "text-anchor": "middle" });
  text.textContent = cut;
  group.append(title, svg("rect", { width, height, rx: 5 }), text);
  if (kind === "accepted" || kind === "rejected") {
    const share = Math.max(1, node.score * (width - 8));
    group.append(svg("rect", { class: "score", x: 4, y: height + 1.5, width: share, height: 1.5 }));
  }
  return group;
}

function drawEdge(node, parent) {
  const { width, height, column, row, top } = NODE;
  const [x1, y1] = [parent.depth * column + width + 1, parent.row * row + top + height / 2];
  const [x2, y2] = [node.depth * column + 1, node.row * row + top + height / 2];
  const middle = (x1 + x2) / 2;
  const kind = node.bonus ? "own" : node.accepted ? "accepted" : "rejected";
  const d = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return svg("path", { class: `edge ${kind}`, d });
}

/** Draws a round's tree into `target`. */
function drawTree(target, round) {
  const { nodes, rows } = placed(round);
  const depths = Math.max(...nodes.map((node) => node.depth)) + 1;
  const labels = Array.from({ length: depths }, (_, depth) => {
    const x = depth * NODE.column + NODE.width / 2 + 1;
    const label = svg("text", { class: "column", x, y: 9, "text-anchor": "middle" });
    const drafts = nodes.some((node) => node.depth === depth && !node.bonus);
    label.textContent = depth ? (drafts ? `depth ${depth}` : "bonus") : "root";
    return label;
  });
  const edges = nodes.slice(1).map((node) => drawEdge(node, nodes[node.parent]));
  // Accepted edges lie above those that cross them.
  edges.sort((a, b) => b.classList.contains("rejected") - a.classList.contains("rejected"));
  target.replaceChildren(...labels, ...edges, ...nodes.map(drawNode));
  target.setAttribute("width", (depths - 1) * NODE.column + NODE.width + 2);
  target.setAttribute("height", rows * NODE.row + NODE.top);
}
