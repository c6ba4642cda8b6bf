// Marks what was searched for, without touching the tokens: the browser paints ranges.

const MOST_FOUND = 2000;

/** Every place in the blocks of text below an element where words stand, as ranges; they may span tokens. */
function findRanges(root, words) {
  const ranges = [];
  for (const block of root.querySelectorAll(".text")) {
    const nodes = [];
    let text = "";
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      if (walker.currentNode.parentElement.className === "role") continue;
      nodes.push({ node: walker.currentNode, from: text.length });
      text += walker.currentNode.data;
    }
    const lower = text.toLowerCase();
    if (lower.length !== text.length) continue; // a few letters change their length, and places would be wrong
    let node = 0;
    const point = (at) => {
      while (node + 1 < nodes.length && nodes[node + 1].from <= at) node += 1;
      return [nodes[node].node, at - nodes[node].from];
    };
    for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, at + words.length)) {
      const range = new Range();
      range.setStart(...point(at));
      const [last, offset] = point(at + words.length - 1);
      range.setEnd(last, offset + 1);
      ranges.push(range);
      if (ranges.length === MOST_FOUND) return ranges;
    }
  }
  return ranges;
}

function markFound(root, words) {
  if (!window.Highlight) return [];
  const ranges = words ? findRanges(root, words.toLowerCase()) : [];
  CSS.highlights.set("found", new Highlight(...ranges));
  return ranges;
}
