// The live panel: speed, acceptance by depth, the rounds of an answer and the tree of one of them.

const byId = (id) => document.getElementById(id);
const REFRESH_MS = 100;
const SEGMENT = { width: 7, gap: 2, height: 5 };

const panel = {
  answer: null,
  /** The round that was selected; null follows the last one. */
  selected: null,
  drawn: 0,
  wanted: false,

  /** Shows an answer, and follows its last round unless one is given. */
  show(answer, round = null) {
    if (this.answer !== answer) {
      this.answer = answer;
      this.drawn = 0;
      byId("strip").replaceChildren();
    }
    this.selected = round;
    this.refresh();
  },

  /** Draws soon, once for all that happens until then: a fast answer must not wait for it. */
  refresh() {
    if (this.wanted) return;
    this.wanted = true;
    setTimeout(() => {
      this.wanted = false;
      if (!this.answer) return;
      this.drawPulse();
      this.drawSpeed();
      this.drawAcceptance();
      this.drawStrip();
      this.drawRound();
    }, REFRESH_MS);
  },

  clear() {
    this.answer = null;
    for (const id of ["strip", "tree", "depths"]) byId(id).replaceChildren();
    for (const id of ["accept-length", "round-name", "verdict", "pulse"]) byId(id).textContent = "";
    byId("here-rate").textContent = "–";
    byId("plain-rate").textContent = "not measured";
    for (const id of ["here-bar", "plain-bar"]) byId(id).style.width = "0";
    for (const id of ["compare", "earlier", "later"]) byId(id).disabled = true;
  },

  drawPulse() {
    const { rate, acceptLength } = this.answer;
    const parts = [];
    if (rate) parts.push(`${rate.toFixed(0)} tok/s`);
    if (acceptLength) parts.push(`${acceptLength.toFixed(2)} tokens a round`);
    byId("pulse").textContent = parts.join(" · ");
  },

  drawSpeed() {
    const { answer } = this;
    const { plain: plainRuns, again } = answer;
    const here = answer.typicalRate;
    const plain = medianRate(plainRuns);
    const most = Math.max(here ?? 0, plain ?? 0, 1e-9);
    byId("here-rate").textContent = here === null ? "–" : `${here.toFixed(1)} tok/s`;
    byId("here-bar").style.width = `${(100 * (here ?? 0)) / most}%`;
    byId("plain-rate").textContent = plain === null ? "not measured" : `${plain.toFixed(1)} tok/s`;
    byId("plain-bar").style.width = `${(100 * (plain ?? 0)) / most}%`;
    let verdict = "";
    if (answer.comparing) {
      verdict = "measuring …";
    } else if (here !== null && plain !== null) {
      const same = [...plainRuns, ...again].every((run) => run.text === answer.text);
      verdict = `${(here / plain).toFixed(2)}×, ${same ? "same text" : "other text"}`;
    }
    byId("verdict").textContent = verdict;
  },

  drawAcceptance() {
    const length = this.answer.acceptLength;
    byId("accept-length").textContent =
      length === null ? "" : `accept length ${length.toFixed(2)}`;
    const rows = this.answer.acceptance.map(({ depth, reached, accepted }) => {
      const bar = document.createElement("i");
      bar.className = `bar ${shadeOf(depth, true)}`;
      bar.style.width = `${(100 * accepted) / reached}%`;
      const track = document.createElement("span");
      track.className = "track";
      track.append(bar);
      const share = document.createElement("output");
      share.textContent = `${Math.round((100 * accepted) / reached)} %`;
      const counts = document.createElement("small");
      counts.textContent = `${accepted}/${reached}`;
      const name = document.createElement("span");
      name.textContent = depth;
      const row = document.createElement("div");
      row.append(name, track, share, counts);
      return row;
    });
    if (!rows.length) {
      const none = document.createElement("p");
      none.className = "none";
      none.textContent = this.nothing();
      rows.push(none);
    }
    byId("depths").replaceChildren(...rows);
  },

  /** Why there are no depths to show. */
  nothing() {
    if (!server.algorithm) return "This server decodes plainly: nothing is drafted.";
    return this.answer.verified.length ? "Nothing was drafted for this answer." : "No round yet.";
  },

  drawStrip() {
    const { width, gap, height } = SEGMENT;
    const strip = byId("strip");
    const { rounds } = this.answer;
    for (; this.drawn < rounds.length; this.drawn++) {
      const round = rounds[this.drawn];
      const drafting = round.tree?.length > 1;
      const group = svg("g", { "data-round": this.drawn });
      const x = this.drawn * (width + gap);
      group.append(svg("rect", { class: "hit", x: x - gap / 2, y: 0, width: width + gap, height: 64 }));
      round.tokens.forEach((token, at) => {
        const y = 60 - (at + 1) * (height + 1);
        const shade = shadeOf(token.drafted, drafting);
        group.append(svg("rect", { class: `cell ${shade}`, x, y, width, height, rx: 1 }));
      });
      strip.append(group);
    }
    strip.setAttribute("width", Math.max(1, rounds.length * (width + gap)));
    strip.setAttribute("height", 64);
    if (this.selected === null) strip.parentElement.scrollLeft = strip.parentElement.scrollWidth;
  },

  /** The number of the round that is shown; none while only the prompt was processed. */
  current() {
    const { rounds } = this.answer;
    const wanted = this.selected ?? rounds.findLastIndex((round) => round.tree);
    return rounds[wanted] ? wanted : null;
  },

  drawRound() {
    const current = this.current();
    const { rounds } = this.answer;
    byId("strip").querySelector(".selected")?.classList.remove("selected");
    byId("earlier").disabled = current === null || current === 0;
    byId("later").disabled = current === null || current >= rounds.length - 1;
    if (current === null) {
      byId("round-name").textContent = "";
      byId("tree").replaceChildren();
      return;
    }
    const round = rounds[current];
    byId("strip").children[current]?.classList.add("selected");
    if (this.selected !== null) this.scrollStrip(current);
    const drafts = round.tree ? round.tree.length - 1 : 0;
    const accepted = round.tree ? round.tree.filter((node) => node.accepted).length - 1 : 0;
    const what = round.tree ? `${accepted} of ${drafts} drafts accepted` : "the prompt’s own token";
    byId("round-name").textContent = `${current} of ${rounds.length - 1}: ${what}`;
    if (round.tree) drawTree(byId("tree"), round);
    else byId("tree").replaceChildren();
  },

  step(by) {
    const to = Math.min(this.answer.rounds.length - 1, Math.max(0, this.current() + by));
    this.show(this.answer, to);
  },

  /** Brings the column of a round into view. */
  scrollStrip(round) {
    const box = byId("strip").parentElement;
    const x = round * (SEGMENT.width + SEGMENT.gap);
    if (x < box.scrollLeft || x + SEGMENT.width > box.scrollLeft + box.clientWidth) {
      box.scrollLeft = x - box.clientWidth / 2;
    }
  },
};

byId("earlier").addEventListener("click", () => panel.step(-1));
byId("later").addEventListener("click", () => panel.step(1));
byId("strip").addEventListener("click", (event) => {
  const group = event.target.closest("[data-round]");
  if (group) panel.show(panel.answer, Number(group.dataset.round));
});
