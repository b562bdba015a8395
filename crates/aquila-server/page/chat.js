// The conversation, the settings, and what connects them with the panel.

const EXAMPLES = [
  "Tom has 3 apples and buys 4 more. How many apples does he have?",
  "Write a short story about a fox and a river.",
  "Count from one to twenty in words.",
];
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const LARGEST_SEED = 2 ** 31;
const SHOW_MS = 30;
const PAIRS = 5;
const COMPARE_MS = 5000;
const SETTLE_MS = 400;

const server = { algorithm: null };
/** The turns so far: {role, content}, and for answers the Answer and its element. */
let turns = [];
/** What stops the answer that is being made. */
let running = null;

// The key is kept for as long as the tab is open, settings for longer.
const stored = (storage, name) => storage.getItem(`aquila-${name}`);
const store = (storage, name, value) => storage.setItem(`aquila-${name}`, value);
const key = () => byId("key").value.trim();

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function say(message) {
  byId("notice").textContent = message;
  byId("notice").hidden = !message;
}

/** What went wrong; a missing key is asked for. */
function fail(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) byId("unlock").hidden = false;
  say(error instanceof TypeError ? "The server cannot be reached." : error.message);
}

function settings() {
  const number = (name) => (byId(name).value === "" ? null : Number(byId(name).value));
  const all = Object.fromEntries(NUMBERS.map((name) => [name, number(name)]));
  return {
    ...all,
    system: byId("system").value,
    route: byId("route").value,
    speculative: byId("speculative").checked,
  };
}

// ---- the conversation

function addTurn(role, content) {
  byId("welcome").hidden = true;
  const item = element("article", role);
  const body = element("div", "text", content);
  item.append(body);
  byId("messages").append(item);
  const turn = { role, content, item, body };
  turns.push(turn);
  follow(true);
  return turn;
}

/** Keeps the end in sight, unless the reader has scrolled away from it. */
function follow(always) {
  const list = byId("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (always || near) list.scrollTop = list.scrollHeight;
}

/** Adds the tokens of rounds to an answer's text. */
function addTokens(turn, rounds) {
  const spans = [];
  for (const { number, tokens, tree } of rounds) {
    const drafting = tree?.length > 1;
    for (const { id, text, drafted } of tokens.filter((token) => token.text)) {
      const span = element("span", `token ${shadeOf(drafted, drafting)}`, text);
      span.dataset.round = number;
      const how = drafted ? `drafted at depth ${drafted}` : drafting ? "bonus" : "nothing drafted";
      span.title = `${how}, round ${number}, token ${id}`;
      spans.push(span);
      turn.shown += text;
    }
  }
  turn.body.append(...spans);
}

/** Makes what is shown the answer's text, where tokens alone do not tell it. */
function complete(turn) {
  const { text } = turn.answer;
  if (text.startsWith(turn.shown)) {
    turn.body.append(text.slice(turn.shown.length));
  } else {
    turn.body.replaceChildren(text);
  }
  turn.shown = text;
}

function summarize(turn) {
  const { answer } = turn;
  const facts = [`${answer.tokens} tokens`];
  if (answer.verified.length) facts.push(`${answer.verified.length} rounds`);
  if (answer.acceptLength) facts.push(`${answer.acceptLength.toFixed(2)} a round`);
  if (answer.rate) facts.push(`${answer.rate.toFixed(0)} tok/s`);
  facts.push(`seed ${answer.request.body.seed}`);
  if (answer.reason === "length") facts.push("cut at max tokens");
  if (["stopped", "failed"].includes(answer.reason)) facts.push(answer.reason);
  const line = element("footer", "", facts.join(" · "));
  const again = element("button", "quiet", "Again");
  again.type = "button";
  again.addEventListener("click", () => regenerate(turn));
  // Browsers have a clipboard for pages that came safely alone: over TLS or from this machine.
  if (navigator.clipboard) {
    const copy = element("button", "quiet", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => navigator.clipboard.writeText(answer.text));
    line.append(copy);
  }
  line.append(again);
  turn.item.append(line);
}

function busy(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("compare").disabled = controller !== null || !panel.answer?.usage;
  document.body.classList.toggle("busy", controller !== null);
}

/** Reads an answer to its end or until it is stopped. */
async function receive(answer, onEvent, { signal }) {
  try {
    const { path, body } = answer.request;
    const response = await ask(path, key(), body, signal);
    for await (const event of events(response)) onEvent(answer.take(event));
  } catch (error) {
    answer.reason = error.name === "AbortError" ? "stopped" : "failed";
    fail(error);
  }
}

/** Does `work` with a controller by which it can be stopped. */
async function stoppable(work) {
  const controller = new AbortController();
  busy(controller);
  try {
    await work(controller);
  } finally {
    busy(null);
  }
}

async function answerTurns() {
  say("");
  const now = settings();
  const seed = now.seed ?? Math.floor(Math.random() * LARGEST_SEED);
  const messages = turns.map(({ role, content }) => ({ role, content }));
  const answer = new Answer(requestFor(now, messages, seed));
  const turn = Object.assign(addTurn("assistant", ""), { answer, shown: "" });
  turn.item.classList.add("growing");
  panel.show(answer);
  // What came is shown together: were it for each event, a fast answer would wait for the page.
  const waiting = [];
  let timer = null;
  const show = () => {
    timer = null;
    addTokens(turn, waiting.splice(0));
    follow(false);
  };
  const heard = (round) => {
    if (round) waiting.push(round);
    timer ??= setTimeout(show, SHOW_MS);
    panel.refresh();
  };
  await stoppable((controller) => receive(answer, heard, controller));
  clearTimeout(timer);
  show();
  turn.item.classList.remove("growing");
  complete(turn);
  turn.content = answer.text;
  if (answer.reason === "failed" && !answer.text) {
    // The question stays in the box, to be sent again.
    turn.item.remove();
    turns.pop();
    const question = turns.pop();
    question.item.remove();
    byId("prompt").value = question.content;
    byId("welcome").hidden = turns.length > 0;
  } else {
    summarize(turn);
  }
  panel.refresh();
  follow(false);
  loadServer();
}

function send(text) {
  if (running || !text.trim()) return;
  addTurn("user", text);
  byId("prompt").value = "";
  grow();
  return answerTurns();
}

function regenerate(turn) {
  if (running) return;
  for (const later of turns.splice(turns.indexOf(turn))) later.item.remove();
  return answerTurns();
}

/**
 * Measures the same request decoded plainly and as it was, in turns, a few times: one short answer
 * says little. Of a long one, which is compared with itself, one plain run is enough.
 */
async function compare() {
  const { answer } = panel;
  if (running || !answer) return;
  say("");
  Object.assign(answer, { plain: [], again: [], comparing: true });
  panel.refresh();
  const { path } = answer.request;
  // Trees are left out on both sides: they are larger than the text, and plain decoding has none.
  const { return_draft_trees: _, ...body } = answer.request.body;
  await stoppable(async (controller) => {
    // Nothing is drawn from here on: it would take time from one of the two.
    await new Promise((drawn) => setTimeout(drawn, SETTLE_MS));
    const begun = performance.now();
    const run = async (runs, body) => {
      const made = new Answer({ path, body });
      await receive(made, () => undefined, controller);
      if (made.usage) runs.push(made);
      return made.usage !== null;
    };
    for (let pair = 0; pair < PAIRS; pair++) {
      if (!(await run(answer.plain, { ...body, speculative: false }))) break;
      if (performance.now() - begun > COMPARE_MS || !(await run(answer.again, body))) break;
    }
  });
  answer.comparing = false;
  panel.refresh();
}

function clear() {
  running?.abort();
  turns.forEach((turn) => turn.item.remove());
  turns = [];
  byId("welcome").hidden = false;
  panel.clear();
  say("");
}

// ---- the server

/** Asks what is served; where a key is missing, asks for it. */
async function loadServer() {
  try {
    const info = await (await ask("/server_info", key())).json();
    byId("unlock").hidden = true;
    const state = info.internal_states[0];
    server.algorithm = info.speculative_algorithm;
    byId("model").textContent = info.served_model_name;
    document.title = `${info.served_model_name} – Aquila`;
    byId("algorithm").textContent = server.algorithm ?? "plain decoding";
    byId("algorithm").hidden = false;
    const policy = state.speculative_policy;
    const facts = {
      "Model": info.served_model_name,
      "Algorithm": server.algorithm ?? "none",
      "Policy": server.algorithm ? policy.name : "–",
      "Largest tree": server.algorithm
        ? `${info.speculative_num_steps} steps, ${info.speculative_num_draft_tokens} nodes`
        : "–",
      "Accept length of all": server.algorithm ? state.avg_spec_accept_length.toFixed(2) : "–",
      "Context": `${info.context_length} tokens`,
      "Version": info.version,
    };
    const list = Object.entries(facts).flatMap(([name, value]) => [
      element("dt", "", name),
      element("dd", "", value),
    ]);
    byId("facts").replaceChildren(...list);
    return true;
  } catch (error) {
    fail(error);
    return false;
  }
}

async function useKey() {
  store(sessionStorage, "key", key());
  say("");
  if (await loadServer()) byId("prompt").focus();
}

// ---- controls

function grow() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 200)}px`;
}

function showTab(name) {
  document.body.dataset.view = name;
  if (name !== "chat") document.body.dataset.side = name;
  for (const tab of document.querySelectorAll("[data-tab]")) {
    // Wide windows have the chat and one of the others side by side, phones one at a time.
    tab.classList.toggle("view", tab.dataset.tab === name);
    tab.classList.toggle("side", tab.dataset.tab === document.body.dataset.side);
  }
}

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function toggleTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  store(localStorage, "theme", next);
  showTheme(next);
}

/** Where a slider stands whose number is not given. */
const RESTING = { temperature: 1, top_p: 1, top_k: 0, max_tokens: 512 };

function syncSliders() {
  for (const field of document.querySelectorAll(".field[data-name]")) {
    const [range, number] = field.querySelectorAll("input");
    range.value = number.value === "" ? RESTING[field.dataset.name] : number.value;
    field.classList.toggle("given", number.value !== "");
  }
}

function saveSettings() {
  const { seed, ...rest } = settings();
  store(localStorage, "settings", JSON.stringify(rest));
  syncSliders();
}

function loadSettings() {
  let saved = {};
  try {
    saved = JSON.parse(stored(localStorage, "settings") ?? "{}");
  } catch {
    // What cannot be read is replaced by the next change.
  }
  for (const name of NUMBERS) byId(name).value = saved[name] ?? "";
  byId("system").value = saved.system ?? "";
  byId("route").value = saved.route ?? "chat";
  byId("speculative").checked = saved.speculative ?? true;
  syncSliders();
}

for (const field of document.querySelectorAll(".field[data-name]")) {
  const [range, number] = field.querySelectorAll("input");
  range.addEventListener("input", () => {
    number.value = range.value;
    saveSettings();
  });
}
byId("settings").addEventListener("input", saveSettings);
byId("defaults").addEventListener("click", () => {
  for (const name of NUMBERS) byId(name).value = "";
  saveSettings();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(byId("prompt").value);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(byId("prompt").value);
});
byId("prompt").addEventListener("input", grow);
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  useKey();
});
byId("use-key").addEventListener("click", useKey);
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("clear").addEventListener("click", clear);
byId("theme").addEventListener("click", toggleTheme);
byId("messages").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  const turn = token && turns.find((turn) => turn.item.contains(token));
  if (!turn) return;
  panel.show(turn.answer, Number(token.dataset.round));
  busy(running);
  if (document.body.dataset.side !== "live") showTab("live");
});
for (const tab of document.querySelectorAll("[data-tab]")) {
  tab.addEventListener("click", () => showTab(tab.dataset.tab));
}
for (const example of EXAMPLES) {
  const button = element("button", "example", example);
  button.type = "button";
  button.addEventListener("click", () => send(example));
  byId("examples").append(button);
}

showTheme(stored(localStorage, "theme"));
byId("key").value = stored(sessionStorage, "key") ?? "";
loadSettings();
showTab("chat");
panel.clear();
loadServer();
